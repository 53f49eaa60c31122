import json
import subprocess
import sys

from tests.support.service_harness import ENVIRONMENT

PROGRAM = """
import json, sys, time
began = time.perf_counter()
import typer, controller.cli
typer.main.get_command(controller.cli.app)
print(json.dumps({"seconds": time.perf_counter() - began, "modules": sorted(sys.modules)}))
"""


def test_the_command_line_is_imported_without_its_heavy_parts():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    measurement = json.loads(done.stdout)
    print(f"\nimport controller.cli: {measurement['seconds']:.3f} s")
    heavy = {"grpc", "numpy", "pydantic", "structlog", "prometheus_client", "google.protobuf"}
    assert not heavy & set(measurement["modules"])


def test_following_pages_imports_no_grpc_before_a_command_has_set_it_up():
    program = "import sys, controller.client.paging; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False)
    assert done.returncode == 0
