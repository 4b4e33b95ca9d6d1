"""Reports: numbers worked out by hand, a page that a browser draws, and tables that sort."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
from cli.conftest import inertiakv as inertiakv  # a fixture
from evaluation.made_up import DESCRIPTION, FULL, LAZY, TOVA, record, records, write_run

from inertiakv_jax.eval import results
from inertiakv_jax.eval.bootstrap import Interval
from inertiakv_jax.eval.report import page
from inertiakv_jax.eval.report_tables import markdown

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return results.load_run(write_run(tmp_path_factory.mktemp("run")))


def test_average_is_over_tasks_and_difference_paired(run):
    lazy = results.quality(run, "ruler", LAZY)
    assert lazy.groups == {"vt@1024": 50.0, "cwe@1024": 75.0}
    assert (lazy.average.value, lazy.examples) == (62.5, 4)
    # Differences by example: vt -0.5 and 0, cwe 0 and -0.5; tasks' means -0.25 each.
    assert lazy.over_full is not None
    assert lazy.over_full.value == -25.0
    assert -50.0 <= lazy.over_full.low < lazy.over_full.high <= 0.0
    full = results.quality(run, "ruler", FULL)
    assert (full.average.value, full.over_full) == (87.5, None)


def test_policies_stand_in_the_order_of_the_settings(tmp_path):
    run = results.load_run(write_run(tmp_path, records()[::-1]))
    assert run.variants == [FULL, LAZY, TOVA]


def test_needle_has_a_second_metric_and_a_grid(run):
    assert results.further_metrics(run, "needle") == ["contains"]
    assert results.quality(run, "needle", TOVA).average == Interval(20.0, 20.0, 20.0)
    assert results.quality(run, "needle", TOVA, "contains").average.value == 0.0
    assert results.needle_grid(run, LAZY) == {
        (1024, 0): 80.0, (1024, 50.0): 80.0, (2048, 0): 80.0, (2048, 50.0): 80.0
    }  # fmt: skip


def test_cost_says_what_was_kept_and_how_fast(run):
    lazy, tova = results.cost(run, LAZY), results.cost(run, TOVA)
    assert (lazy.kept_percent, lazy.evicted, lazy.idle) == (50.0, 500.0, 0)
    assert (lazy.kv_mib_full, lazy.kv_mib_kept) == (4.0, 2.0)
    assert (lazy.tokens_per_s, tova.tokens_per_s) == (30.0, None)
    assert (lazy.prefill_s, lazy.peak_device, lazy.peak_host) == (1.5, None, 2**30)
    assert results.cost(run, FULL).idle == 8


def test_papers_numbers_stand_beside_ours(run):
    full, lazy, kvzip = results.published(run)
    assert (full.theirs, full.theirs_over_full) == (94.59, None)
    assert lazy.theirs_over_full == pytest.approx(75.45 - 94.59)
    assert lazy.ours is not None
    assert lazy.ours.average.value == 62.5
    assert kvzip.ours is None


def test_breakdown_by_a_tag(tmp_path):
    made = [
        record(FULL, group, index, score, benchmark="longbench-e", tags={"bucket": bucket})
        for group, index, score, bucket in (
            ("qasper_e", 0, 1.0, "0-4k"),
            ("qasper_e", 1, 0.5, "0-4k"),
            ("qasper_e", 2, 0.2, "8k+"),
            ("trec_e", 0, 0.0, "0-4k"),
        )
    ]
    run = results.load_run(write_run(tmp_path, made))
    assert results.tag_names(run, "longbench-e") == ["bucket"]
    # 0-4k: mean of 75 and 0
    assert results.by_tag(run, "longbench-e", FULL, "bucket") == {"0-4k": 37.5, "8k+": 20.0}
    assert "| full | 37.50 | 20.00 |" in markdown([run])


def test_markdown_has_the_numbers(run):
    text = markdown([run])
    assert "# made up & small" in text
    assert "tiny<1> (float32) on 1 x cpu, jax 0.10.2; 24 records" in text
    assert "still missing" not in text
    assert re.search(r"\| lazy4 ratio=0\.5 \| 50\.0 \| 62\.50 \[.*\| -25\.00 \[", text)
    assert "| **-80.00 [-80.00, -80.00]** |" in text  # the needle under TOVA
    assert "| lazy4 ratio=0.5 | ruler | L | 75.45 | -19.14 | 62.50 [" in text
    assert "| tova ratio=0.5 | 50.0 | 500.0 | 0 | 4.00 | 2.00 | 1.50 |  |  | 1,024 |" in text


def test_unfinished_run_says_so_and_compares_what_both_have(tmp_path):
    made = [
        line for line in records() if line["example"] != "cwe@1024/1" or line["variant"] != LAZY
    ]
    run = results.load_run(write_run(tmp_path, made))
    assert run.missing == 1
    assert "23 records, 1 still missing" in markdown([run])
    lazy = results.quality(run, "ruler", LAZY)
    assert lazy.over_full is not None
    assert lazy.over_full.value == -12.5  # vt -0.25, cwe 0 on its one example


class Page(html.parser.HTMLParser):
    """Checks that tags close in order, and collects what a page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.scripts = [], [], 0

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:")):
                self.loads.append(value)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.scripts += tag == "script"

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_sound_and_loads_nothing(run):
    checker = Page()
    checker.feed(page([run, run]))
    assert checker.open == []
    assert checker.loads == []
    assert checker.scripts == 1
    assert "url(http" not in page([run])
    assert "made up &amp; small" in page([run])


def test_page_is_the_same_for_the_same_numbers(run):
    assert page([run]) == page([run])


def test_command_writes_page_and_tables(inertiakv, tmp_path):
    folder = write_run(tmp_path / "run")
    done = inertiakv("report", folder)
    assert done.code == 0, done.err
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "report.md").read_text().startswith("# made up & small")
    done = inertiakv("report", folder, "--out", tmp_path / "x.html")
    assert done.code == 0
    assert (tmp_path / "x.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "is no run: it has no run.json"),
        (["run", "--out", "nowhere/x.html"], "the folder nowhere does not exist"),
        (["run", "--out", "run/run.json/x.html"], "the folder run/run.json is a file"),
        (["taken"], "--out must be a file, got the folder taken/report.html"),
        (["run", "--out", "x.md"], "ends in .html"),
        (["empty"], "has no records yet"),
        (["twice"], "has vt@1024/0 with full twice"),
    ],
)
def test_bad_command_is_named(arguments, message, inertiakv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    write_run(tmp_path / "twice", [records()[0], records()[0] | {"prediction": "another"}])
    (write_run(tmp_path / "taken") / "report.html").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text(json.dumps(DESCRIPTION))
    done = inertiakv("report", *arguments)
    assert (done.code, message in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": None}, "vt@1024/0 with full: group must be a text, got None"),
        ({"scores": {"f1": "x"}}, "vt@1024/0: scores must be numbers"),
        ({"evicted": True}, "evicted must be a number, got True"),
        ({"cost": {"prefill_s": 1.0}}, "cost.peak_bytes must be an object, got None"),
        ({"example": ["a"]}, "line 1 is no record"),
    ],
)
def test_edited_record_is_named(changes, message, inertiakv, tmp_path):
    done = inertiakv("report", write_run(tmp_path, [records()[0] | changes]))
    assert (done.code, message in done.err) == (2, True), done.err


def test_edited_description_is_named(inertiakv, tmp_path):
    folder = write_run(tmp_path, description=DESCRIPTION | {"device": {"count": 1}})
    done = inertiakv("report", folder)
    assert done.code == 2
    assert "run.json: device.kind must be a text, got None" in done.err


PROBE = """
<script>
window.addEventListener("load", () => {
  const said = (text) => {
    const note = document.createElement("pre");
    note.className = "probe";
    note.textContent = text;
    document.body.append(note);
  };
  const first = () => document.querySelector("tbody tr").cells[0].textContent;
  const head = document.querySelectorAll("th")[2];
  head.click();
  said("down: " + first() + ", " + head.getAttribute("aria-sort"));
  head.click();
  said("up: " + first() + ", " + head.getAttribute("aria-sort"));
  for (const svg of document.querySelectorAll("figure svg")) {
    const box = svg.getBoundingClientRect();
    const paths = svg.querySelectorAll("path").length;
    said("figure: " + (box.width > 100 && box.height > 100 && paths > 9));
  }
});
</script>
"""


def test_browser_draws_the_page_and_sorts_by_a_click(run, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    path = tmp_path / "report.html"
    path.write_text(page([run]).replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000"),
            *(f"--user-data-dir={tmp_path}", path.as_uri()),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    said = re.findall(r'<pre class="probe">(.*?)</pre>', done.stdout)
    assert said == [
        "down: full, descending",
        "up: tova ratio=0.5, ascending",
        *["figure: true"] * 5,  # two curves of two benchmarks, and the needle maps
    ]
