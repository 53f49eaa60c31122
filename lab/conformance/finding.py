"""Collects what breaks a rule, once for each rule, with the first place where it did."""

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Holds broken rules by their names: the first place of each, and how often it was broken."""

    first: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def expect(self, holds: bool, rule: str, where: str) -> None:
        """Notes the rule as broken unless it holds."""
        if not holds:
            self.first.setdefault(rule, where)
            self.times[rule] = self.times.get(rule, 0) + 1

    def lines(self) -> list[str]:
        """Returns a line for each broken rule."""
        return [
            f"{rule}: {where}" + (f" (and {n} times more)" if (n := self.times[rule] - 1) else "")
            for rule, where in self.first.items()
        ]
