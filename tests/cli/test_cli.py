"""What all commands share: help, exit codes, and the program as it is installed."""

import os
import subprocess
import sys

import pytest

from inertiakv_jax import cli
from inertiakv_jax.commands.generate import Generate

COMMANDS = tuple(cli.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    example = text.partition("Example")[2]
    assert f"\n  inertiakv {command} " in example


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_parsed(command, capsys):
    import shlex

    with pytest.raises(SystemExit):
        cli.run([command, "--help"])
    # Up to the options, whose defaults may begin with the word, too.
    lines = capsys.readouterr().out.partition("Example")[2].partition("\n\n")[0].splitlines()
    examples = [line.split("| ")[-1].strip() for line in lines if "inertiakv " in line[:40]]
    assert examples
    for example in examples:
        program, *arguments = shlex.split(example)
        assert program == "inertiakv"
        assert isinstance(cli.parse(arguments), cli.COMMANDS[command][0])


def test_help_has_a_line_for_every_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        cli.run(["--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.partition("(required)")[2].splitlines()
    assert [line for line in map(str.strip, lines) if line] == [
        f"• {name:<13} {text.splitlines()[0]}" for name, (_, text) in cli.COMMANDS.items()
    ]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", "before it with a blank line between, or the whole prompt if there is no"),
        ("bench", "TPUs or NVIDIA GPUs. Default: the best for the device."),
        ("bench", "(default: full inertiakv lazy4 score-free)"),
    ],
)
def test_options_are_described_without_a_break(command, option, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.run([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert option in " ".join(" ".join(line.strip("│ ") for line in lines).split())
    (start,) = [i for i, line in enumerate(lines) if " --implementation " in line]
    texts = [line.strip("│ ") for line in lines[start + 1 : start + 3]]
    assert all(len(text) > 40 for text in texts), "a line breaks off before it is full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Expected one of"),
        (["generat"], "Unrecognized options: generat"),
        (["demo", "--tokens", "many"], "many"),
    ],
)
def test_arguments_that_cannot_be_parsed_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no good"), 2),
        (ConnectionError("no good"), 1),
        (FloatingPointError("no good"), 1),
        (PermissionError("no good"), 1),
        (MemoryError("no good"), 1),
    ],
)
def test_exit_codes(error, code, inertiakv, monkeypatch):
    def fail(self):
        raise error

    monkeypatch.setattr(Generate, "run", fail)
    done = inertiakv("generate", "x")
    assert (done.code, done.out, done.err) == (code, "", "error: no good\n")
    monkeypatch.setenv("INERTIAKV_DEBUG", "1")
    with pytest.raises(type(error), match="no good"):
        inertiakv("generate", "x")


def test_mistakes_of_ours_show_their_traceback(inertiakv, monkeypatch):
    monkeypatch.setattr(Generate, "run", lambda self: {}["missing"])
    with pytest.raises(KeyError):
        inertiakv("generate", "x")


def test_interrupted(inertiakv, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Generate, "run", interrupt)
    done = inertiakv("generate", "x")
    assert (done.code, done.err) == (130, "interrupted\n")


def test_error_is_red_on_a_terminal(inertiakv, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31merror: " in inertiakv("generate", "x", "--policy", "none").err


def program(*arguments, code=None, **environment):
    command = [sys.executable, "-W", "error"]
    command += ["-c", code] if code else ["-m", "inertiakv_jax"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_module_runs_and_keeps_compiled_programs(tiny_model, tmp_path):
    options = ["--model", tiny_model, "--max-new-tokens", 2]
    done = program("generate", "the", *options, INERTIAKV_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stderr
    assert (tmp_path / "programs").is_dir()


def test_reader_that_has_had_enough_is_no_error(tiny_model):
    """As ``inertiakv generate ... | true``: the pipe is closed before anything is printed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "inertiakv_jax", "generate", "x", "--stream"]
    options = ["--model", str(tiny_model), "--max-new-tokens", "2"]
    done = subprocess.run(
        [*command, *options], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 1
    # Not empty where a CUDA plugin is installed: it says that there is no GPU.
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_closed_output_is_written_to_nobody(tiny_model):
    """As ``inertiakv generate ... >&-``."""
    command = [sys.executable, "-m", "inertiakv_jax", "generate", "x"]
    options = ["--model", str(tiny_model), "--max-new-tokens", "2"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command, *options],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stderr


def test_closed_input(inertiakv, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    done = inertiakv("generate", "-")
    assert (done.code, done.err) == (2, "error: standard input is closed\n")


def test_help_imports_nothing_that_is_slow():
    code = (
        "import sys\n"
        "from inertiakv_jax.cli import run\n"
        "try:\n"
        "    run(['bench', '--help'])\n"
        "except SystemExit:\n"
        "    slow = {'transformers', 'torch', 'matplotlib', 'kvpress'} & set(sys.modules)\n"
        "    print('slow:', sorted(slow))\n"
    )
    assert program(code=code).stdout.splitlines()[-1] == "slow: []"
