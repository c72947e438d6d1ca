"""The command line as a whole: help without heavy imports, one clear line for wrong input."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from edgevit.cli import COMMANDS, main


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from edgevit.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'coremltools', 'onnx', 'rich', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("[]\n"), done.stdout[-300:] + done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) > 5


def test_unknown_command_is_one_line_and_exit_2():
    result = CliRunner().invoke(main, ["exprot"])
    assert result.exit_code == 2
    assert "exprot" in result.output
