"""The page holds every figure, needs nothing from outside, and its token view answers in a real browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from headtrain.report import compact, render, shares, tree_name, write_page
from tests.headtrain.test_plots import make_set

REPORT = {
    "head": "runs/<head>",
    "target": "org/target",
    "device": "CPU",
    "dtype": "bfloat16",
    "versions": {"headtrain": "0.1.0"},
    "date": "2026-01-02",
    "settings": {
        "rule": "greedy",
        "temperature": 0.0,
        "batch_size": 1,
        "seed": None,
        "plan": {"kind": "chain", "depth": 4},
    },
    "definitions": {"acceptance_length": "tokens per step"},
    "sets": [make_set("asks"), make_set("more")],
    "mean": {"acceptance_length": 1.9, "tokens_per_second": 20.0, "speedup": {"engine": 1.33, "transformers": 1.43}},
}
TARGET = {"text": " <b>", "token": 1, "depth": 0, "rank": None, "draft": None, "target": 0.25}
ROWS = [
    {**TARGET, "refused": {"text": "oak", "draft": 0.4, "target": 0.01}},
    {"text": "x\n", "token": 2, "depth": 1, "rank": 2, "draft": 0.125, "target": 0.5, "refused": None},
    {"text": "", "token": 3, "depth": 9, "rank": 1, "draft": 0.75, "target": 1.0, "refused": None},
]
REPLY = {"name": "asks", "prompt": "say </script> & more", "acceptance_length": 2.0, "rows": ROWS}
PREDICTED = [{"name": "asks", "predicted": 1.4, "measured": 1.33, "error": 0.053}]


def test_page(tmp_path):
    page = write_page(REPORT, tmp_path, [REPLY], PREDICTED).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "acceptance_by_depth.png", "report.html", "speedup_by_set.png", "step_time.png",
    ]  # fmt: skip
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:)|url\(|@import|https?:""", page)
    for part in ("runs/&lt;head&gt;", "1.33", "1.90", "chain of 4", "+5.3 %", "say &lt;/script&gt; &amp; more", "asks"):
        assert part in page, part
    spans = re.search(r'<div class="tokens".*?>(<span.*?)</div>', page, re.S)[1]
    assert spans == ('<span class="t"> &lt;b&gt;</span><span class="d1 n">x\n</span><span class="d6 e"></span>')
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert data == compact(ROWS) == [[0, None, None, 0.25, "oak", 0.4, 0.01], [1, 2, 0.125, 0.5], [9, 1, 0.75, 1.0]]
    assert shares(ROWS) == [(0, 1), (1, 1), (9, 1)]


def test_without_replies_or_plots_it_is_a_page_still():
    page = render(REPORT, [], [], [], {})
    assert "Token view" not in page and "<h2>Plots" not in page and page.rstrip().endswith("</html>")


def test_points_take_the_place_of_sets():
    point = {"head": "h", "rule": "greedy", "temperature": 0.0, "context": None, "tree": None}
    rows = [{"point": {**point, "batch": batch}, **REPORT["mean"], "plain": 15.0, "mismatches": 0} for batch in (1, 4)]
    page = render(REPORT, [], [], rows, {})
    assert "<h2>Points" in page and "<h2>Sets" not in page
    assert "<th>batch</th><th>tokens a step</th>" in page and "<td>4</td>" in page


def test_tree_names():
    assert tree_name({"kind": "static", "paths": [[0], [0, 0]]}) == "static tree of 3 nodes, depth 2"
    assert (
        tree_name({"kind": "dynamic", "size": 8, "depth": 3, "width": 4}) == "dynamic tree of 8 nodes, depth 3, width 4"
    )
    assert tree_name({"kind": "plain"}) == "no tree"


PROBE = """<script>{
const found = [], tokens = document.querySelectorAll(".tokens span"), box = tokens[0].parentNode;
const look = () => found.push(tip.style.visibility + "|" + tip.innerText);
tokens[1].dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" })); look();
box.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" })); look();
box.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" })); look();
tokens[2].click(); look();
document.title = JSON.stringify(found) + document.documentElement.scrollWidth;
}</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_hover_tap_and_keys_in_a_browser(width, tmp_path):
    page = render(REPORT, [REPLY], PREDICTED, [], {}).replace("</body>", PROBE + "</body>")
    (tmp_path / "page.html").write_text(page)
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", f"file://{tmp_path / 'page.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    found, end = json.JSONDecoder().raw_decode(title)
    assert found[0].startswith("visible|“x\\n” drafted at depth 1")
    assert "rank" in found[0] and "13 %" in found[0] and "50 %" in found[0]
    assert found[1].startswith("visible|“␣<b>” written by the target") and "oak" in found[1] and "1.0 %" in found[1]
    assert found[2].startswith("hidden|")
    assert found[3].startswith("visible|“” drafted at depth 9") and "75 %" in found[3]
    assert int(title[-4:].strip("]")) <= width  # nothing wider than the window
