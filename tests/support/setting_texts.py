"""What is written below each field of a settings class."""

import ast
import inspect
import textwrap

from pydantic import BaseModel


def setting_texts(settings: type[BaseModel]) -> dict[str, str]:
    """Returns the description of each own field, in one line, "" for one without any.

    It is that of its `Field`, or the string below it in the source.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, next_statement in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        name = field.target.id
        text = settings.model_fields[name].description or ""
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            text = str(next_statement.value.value)
        texts[name] = " ".join(text.split())
    return texts
