"""What a reader sees of report.html and can do with it, in headless Chromium from file://."""

import json
import shutil

import msgspec
import numpy as np
import pytest

from aorta.page.html import write_page
from aorta.page.parts import DARK, LIGHT, number
from aorta.records.stacks import StackFrame
from aorta.timeline.types import Segment
from tests.account.judge.sampled_runs import BACKWARD, MAIN, SLEEP, sampled, sampled_dataset
from tests.account.reports_in_memory import dataset_of, records_of, report_of
from tests.chromium import ABSENT, browser, executable
from tests.page.hostile_report import HOSTILE, hostile_report

pytestmark = pytest.mark.skipif(executable() is None, reason=ABSENT)

CANVAS = "#timeline-canvas"
CHART = "#distribution-chart"
MARKS = "Number(document.querySelector('{}').dataset.marks || 0)"
PIXELS = """(() => {
  const canvas = document.querySelector('#timeline-canvas'), count = {};
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const colour = '#' + [0, 1, 2].map(j => data[i + j].toString(16).padStart(2, '0')).join('');
    count[colour] = (count[colour] || 0) + 1;
  }
  return count; })()"""
"""How many pixels of the canvas have each colour."""
ROWS = "[...document.querySelectorAll('#collectives tbody tr:not([hidden])')]"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    a = dataset_of("ref", records_of(num_steps=30, num_collectives=20))
    b = dataset_of("cand", records_of(num_steps=30, num_collectives=20, slowdown=1.08, seed=3))
    plain = records_of(num_steps=4, active_segments=None, num_ranks=1)
    reports = {
        "compared": report_of(a, b, comparison=True),
        "single": report_of(a),
        "hostile": hostile_report(),
        "large": report_of(dataset_of("a", records_of(num_steps=50, num_ranks=8, num_collectives=100))),
        "sampled": report_of(sampled_ranks()),
        "without-details": report_of(dataset_of("a", plain)),
        "dense": report_of(
            dataset_of("few", records_of(num_steps=4)), dataset_of("many", dense_records(), num_warmup=0)
        ),
    }
    for name, report in reports.items():
        write_page(folder / f"{name}.html", report)
    return {name: folder / f"{name}.html" for name in reports}


def sampled_ranks():
    """Rank 1 sleeps in augment(), in a file whose name is markup."""
    hostile = StackFrame("/job/<img src=x onerror=alert(1)>.py", 5, "augment", is_program=True)
    work = [(step, 20_000, "runs", MAIN, BACKWARD) for step in range(2, 12)]
    sleep = [(step, 10_000, "sleeps", MAIN, hostile, SLEEP) for step in range(2, 12)]
    return sampled_dataset([sampled(*work), sampled(*work, *sleep)])


def dense_records():
    """A step of 900 ms in which the device computes in 9000 short stretches: half of the time."""
    many = [Segment(i * 0.1, i * 0.1 + 0.05, ["compute"], 1) for i in range(9000)]
    (record,) = records_of(num_steps=1, num_ranks=1)[0]
    return {0: [msgspec.structs.replace(record, step_ms=900.0, active_segments=many, collectives=[])]}


@pytest.fixture(scope="module")
def tab(chromium):
    return chromium.open("about:blank")


@pytest.fixture
def shown(tab, files):
    """Loads a page in the one tab; checks, when the next is asked for and on the way out, that it had no
    complaint and asked for nothing.

    All have one address: scripts that the browser has compiled for an address are not compiled again.
    """
    file = next(iter(files.values())).with_name("shown.html")
    address = file.as_uri()
    names = []

    def check():
        assert tab.complaints() == []
        assert {url.partition("#")[0] for url in tab.requests()} == {address}

    def show(name, **options):
        if names:
            check()
        names.append(name)
        shutil.copyfile(files[name], file)
        tab.show(address, **options)
        return tab

    yield show
    if names:
        check()


def choose(page, selector, value):
    page.js(
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})"
        f"(document.querySelector('{selector}'))"
    )


def scroll_to(page, selector):
    page.js(f"document.querySelector('{selector}').scrollIntoView({{behavior: 'instant', block: 'center'}})")


@pytest.mark.parametrize("name", ["compared", "single", "hostile", "large"])
def test_charts_are_drawn(shown, name):
    page = shown(name)
    assert page.js(MARKS.format(CANVAS)) > 10
    assert page.js("document.querySelectorAll('#time svg rect').length") > 4
    scroll_to(page, CHART)
    page.wait(MARKS.format(CHART) + " > 10")


def test_stacks_are_drawn_for_each_rank_against_the_others(shown):
    page = shown("sampled")
    scroll_to(page, "#stacks-chart")
    page.wait(MARKS.format("#stacks-chart") + " == 5")
    choose(page, "#stacks-view", "0")
    choose(page, "#stacks-view", "2")
    said = page.js("document.querySelector('#stacks-said').textContent")
    assert said.startswith("Rank 1 against the others: ")
    assert page.js("document.querySelectorAll('#stacks img').length") == 0
    labels = "[...document.querySelectorAll('#stacks-chart .slicetext')].map(text => text.textContent)"
    page.wait(f"{labels}.some(text => text.startsWith('augment(), <img src'))")


def test_the_canvas_holds_the_colours_of_the_states(shown):
    page = shown("single")
    found = page.js(PIXELS)
    for state in ("compute", "hidden", "exposed", "idle"):
        assert found.get(LIGHT[state], 0) > 200, state


def test_more_spans_than_pixels_show_their_share(shown):
    """Compute half of the time: half of the height of the row, not all of it."""
    page = shown("dense")
    assert "each run has the whole width" in page.js("document.querySelector('#timeline-note').textContent")
    page.js("[...document.querySelectorAll('#timeline-ranks input')].slice(0, 2).forEach(box => box.click())")
    height = 20 + 13  # the thick row and the one below it
    width = page.js("document.querySelector('#timeline-canvas').clientWidth") - 150
    assert 0.35 < page.js(PIXELS)[LIGHT["compute"]] / (height * width) < 0.6  # edges are blended


def test_a_table_sorts_by_click_and_by_key(shown):
    page = shown("compared")
    duration = "#collectives thead th:nth-child(8)"
    values = f"{ROWS}.map(row => Number(row.cells[7].dataset.value))"
    aria = f"document.querySelector('{duration}').getAttribute('aria-sort')"
    assert page.js(aria) == "none"
    page.click(f"{duration} button")
    assert page.js(values) == [1.5, 1.5, 12, 12]
    assert page.js(aria) == "ascending"
    page.js(f"document.querySelector('{duration} button').focus()")
    page.press("Enter", 13)
    assert page.js(aria) == "descending"
    page.press(" ", 32)
    assert page.js(aria) == "ascending"
    page.press(" ", 32)
    assert page.js(values) == [12, 12, 1.5, 1.5]
    page.click("#collectives thead th:nth-child(1) button")
    assert page.js(aria) == "none"
    assert page.js(f"{ROWS}.map(row => row.cells[0].textContent)") == ["cand", "cand", "ref", "ref"]


def test_what_was_not_measured_is_last_in_either_order(shown):
    page = shown("compared")
    wait = "#collectives thead th:nth-child(11) button"
    for _ in range(2):
        page.click(wait)
        assert page.js(f"{ROWS}.map(row => row.cells[10].textContent)") == ["1.50", "1.50", "n/a", "n/a"]


def test_a_table_is_filtered_by_what_is_typed(shown):
    page = shown("compared")
    page.js("document.querySelector('#collective-filter').focus()")
    for key in "cand gather":
        page.press(key)
    assert page.js(f"{ROWS}.map(row => row.cells[1].textContent)") == ["all_gather"]
    assert page.js("document.querySelector('#collectives output').textContent") == "1 of 4 rows"


def test_the_theme_follows_the_system_and_the_button(shown):
    page = shown("single", dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    rgb = {name: "rgb({}, {}, {})".format(*(int(theme["paper"][i : i + 2], 16) for i in (1, 3, 5)))
           for name, theme in (("light", LIGHT), ("dark", DARK))}  # fmt: skip
    assert page.js(background) == rgb["dark"]
    pixel = (
        "[...document.querySelector('#timeline-canvas').getContext('2d').getImageData(3, 3, 1, 1).data]"
        ".slice(0, 3).join(', ')"
    )
    page.click("#theme")
    assert page.js(background) == rgb["light"]
    assert page.js(f"'rgb(' + {pixel} + ')'") == rgb["light"]
    assert page.js("document.querySelector('#theme').textContent") == "Dark"
    page.js("localStorage.clear()")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_contrast(shown, dark):
    """WCAG AA of each text as it is shown, 4.5 or 3 for large text; canvas and chart are in test_palette."""
    page = shown("compared", dark=dark)
    page.js("for (const d of document.querySelectorAll('details')) d.open = true")
    texts = page.js(
        """(() => {
        const found = new Map();
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let node; (node = walker.nextNode());) {
          const element = node.parentElement, style = getComputedStyle(element);
          if (!node.data.trim() || !element.getClientRects().length) continue;
          if (element.closest('#distribution-chart')) continue;
          const clear = 'rgba(0, 0, 0, 0)';
          let ground = element, colour = clear;
          for (; ground && colour === clear; ground = ground.parentElement) {
            colour = getComputedStyle(ground).backgroundColor;
          }
          const key = [style.color, colour, parseFloat(style.fontSize) >= 24].join('|');
          found.set(key, node.data.trim().slice(0, 30));
        }
        return [...found]; })()"""
    )
    assert len(texts) > 3
    for key, text in texts:
        colour, ground, large = key.split("|")
        a, b = (luminance(value) for value in (colour, ground))
        contrast = (max(a, b) + 0.05) / (min(a, b) + 0.05)
        assert contrast >= (3 if large == "true" else 4.5), (text, key)


def luminance(text):
    rgb = np.array([float(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]])
    return float(
        np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
    )


def test_markup_from_outside_is_never_run(shown):
    page = shown("hostile")
    scroll_to(page, CHART)
    page.wait(MARKS.format(CHART) + " > 10")
    num = page.js("document.querySelector('#distribution-metric').options.length")
    for i in range(num):
        choose(page, "#distribution-metric", i)
    x, y = page.centre(f"{CHART} .nsewdrag")
    for step in range(-200, 200, 40):
        page.hover(x + step, y)
    page.centre(CANVAS)
    page.js("document.querySelector('#timeline-canvas').focus()")
    for key in ("ArrowDown", "ArrowDown", "n", "n"):
        page.press(key)
    assert HOSTILE.split()[0] in page.js("document.querySelector('#tip').textContent")
    assert page.js("typeof window.hit") == "undefined"
    assert page.js("document.querySelectorAll('img').length") == 0
    assert page.js("document.querySelector('h1').textContent") == HOSTILE
    legend = page.js(f"[...document.querySelectorAll('{CHART} .legendtext')].map(e => e.textContent)")
    assert any("<script>" in text for text in legend)


def test_hovering_a_collective_tells_its_numbers(shown):
    page = shown("single")
    page.centre(CANVAS)
    left, top, width = page.js(
        f"(b => [b.x, b.y, b.width])(document.querySelector('{CANVAS}').getBoundingClientRect())"
    )
    seen = ""
    for down in range(30, 140, 4):
        page.hover(left + 150 + 0.8 * (width - 150), top + down)
        tip = page.js("(t => t.hidden ? '' : t.innerText)(document.querySelector('#tip'))")
        if "all_gather" in tip:
            seen = tip
    for part in ("64.0 MiB, bfloat16", "dp, 2 ranks", "GB/s", "waiting for the last rank", "exposed", " ms"):
        assert part in seen
    page.hover(5, 5)
    page.wait("document.querySelector('#tip').hidden")


def test_the_timeline_is_used_from_the_keyboard(shown):
    page = shown("single")
    page.centre(CANVAS)
    page.js("document.querySelector('#timeline-canvas').focus()")
    everything = page.js(MARKS.format(CANVAS))
    for _ in range(8):
        page.press("+")
    assert 0 < page.js(MARKS.format(CANVAS)) < everything
    page.press("0")
    assert page.js(MARKS.format(CANVAS)) == everything
    page.press("n")
    first = page.js("document.querySelector('#timeline-said').textContent")
    assert "rank 0" in first
    assert " ms" in first
    page.press("n")
    assert page.js("document.querySelector('#timeline-said').textContent") != first


def test_the_timeline_zooms_and_moves_with_the_mouse(shown):
    page = shown("single")
    everything = page.js(MARKS.format(CANVAS))
    for _ in range(5):
        page.click("#zoom-in")
    zoomed = page.js(MARKS.format(CANVAS))
    assert zoomed < everything
    page.click("#zoom-all")
    assert page.js(MARKS.format(CANVAS)) == everything


def test_another_step_and_fewer_ranks_are_chosen(shown):
    page = shown("single")
    said = page.js("document.querySelector('#timeline-canvas').getAttribute('aria-label')")
    marks = page.js(MARKS.format(CANVAS))
    choose(page, "#timeline-step", "last")
    assert page.js("document.querySelector('#timeline-canvas').getAttribute('aria-label')") != said
    page.click("#timeline-ranks input")
    assert 0 < page.js(MARKS.format(CANVAS)) < marks


def test_tab_reaches_every_control_and_shows_where_it_is(shown):
    page = shown("compared")
    seen = []
    for _ in range(120):
        page.press("Tab", 9)
        seen.append(
            page.js(
                "(e => [e.id || e.textContent, getComputedStyle(e).outlineStyle])(document.activeElement)"
            )
        )
        if seen[-1][0] == "distribution-metric":
            break
    names = [name for name, _ in seen]
    assert names[0] == "Skip to the answer"
    wanted = ["theme", "timeline-step", "timeline-canvas", "collective-filter", "distribution-metric"]
    assert [name for name in names if name in wanted] == wanted
    assert all(outline != "none" for _, outline in seen)


def test_charts_have_words_beside_them(shown):
    page = shown("single")
    scroll_to(page, CHART)
    page.wait(MARKS.format(CHART) + " > 10")
    assert "Timeline of median step" in page.js(
        f"document.querySelector('{CANVAS}').getAttribute('aria-label')"
    )
    assert "quartiles" in page.js(f"document.querySelector('{CHART}').getAttribute('aria-label')")
    assert page.js("[...document.querySelectorAll('svg.chart')].every(e => e.getAttribute('aria-label'))")


def test_nothing_moves_while_the_page_loads(shown):
    page = shown("large")
    scroll_to(page, CHART)
    page.wait(MARKS.format(CHART) + " > 10")
    shift = page.js(
        """new Promise(done => {
        let sum = 0;
        new PerformanceObserver(list => {
          for (const entry of list.getEntries()) if (!entry.hadRecentInput) sum += entry.value;
        }).observe({type: 'layout-shift', buffered: true});
        setTimeout(() => done(sum), 100); })"""
    )
    assert shift < 0.02


def test_a_large_run_stays_responsive(shown):
    """8 ranks, 50 steps, 100 collectives a step. Generous limits: this machine may be busy."""
    page = shown("large")
    loaded_ms = page.js("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert loaded_ms < 5000
    page.centre(CANVAS)
    page.js("document.querySelector('#timeline-canvas').focus()")
    page.js(
        "for (const box of document.querySelectorAll('#timeline-ranks input')) if (!box.checked) box.click()"
    )
    assert page.js(MARKS.format(CANVAS)) > 8 * 100
    frame_ms = page.js(
        """(() => {
        const button = document.querySelector('#zoom-in'), start = performance.now();
        for (let i = 0; i < 10; i++) button.click();
        return (performance.now() - start) / 10; })()"""
    )
    assert frame_ms < 200


def test_it_can_be_read_without_scripts(shown):
    page = shown("compared")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.reload")
    page.wait(
        "document.readyState === 'complete' && !document.documentElement.classList.contains('scripted')"
    )
    words = page.js("document.querySelector('main').innerText")
    assert "cand takes longer than ref" in words
    assert "all_gather" in words
    assert page.js("document.querySelectorAll('#time svg rect').length") > 4
    assert page.js("document.querySelector('.needs-script').getClientRects().length") == 0


def test_without_details_the_page_says_so(shown):
    page = shown("without-details")
    assert "no step has its details from every rank" in page.js(
        "document.querySelector('#timeline').innerText"
    )
    scroll_to(page, CHART)
    page.wait(MARKS.format(CHART) + " > 2")


def test_on_paper_it_is_light_and_has_no_controls(shown):
    page = shown("compared", dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in ("nav", "#theme", ".controls"):
        assert page.js(f"document.querySelector('{selector}').getClientRects().length") == 0
    assert len(page.call("Page.printToPDF", printBackground=True)["data"]) > 50_000


def test_on_paper_no_verdict_is_cut_off(shown):
    page = shown("compared", width=720)  # A4 or Letter, upright, with the usual margins
    page.call("Emulation.setEmulatedMedia", media="print")
    cells = "[...document.querySelectorAll('#changes > .scroll td:last-child')]"
    assert page.js(f"Math.max(...{cells}.map(cell => cell.getBoundingClientRect().right))") <= 720


@pytest.mark.parametrize("width", [360, 760])
def test_a_narrow_window_scrolls_tables_and_not_the_page(shown, width):
    page = shown("compared", width=width)
    assert page.js("document.documentElement.scrollWidth") <= width


def test_the_data_is_what_was_written(shown):
    page = shown("single")
    data = page.js("JSON.stringify(JSON.parse(document.querySelector('#distribution-data').textContent))")
    assert json.loads(data)["runs"][0]["label"] == "ref"


HEAT = "#heat-canvas"


def test_a_rank_is_chosen_in_the_map_of_ranks_by_steps(shown):
    page = shown("large")
    page.wait(f"{MARKS.format(HEAT)} === 8 * 50")
    page.hover(*page.centre(HEAT))
    page.wait("document.querySelector('#tip').textContent.startsWith('rank ')")
    assert ", step 2" in page.js("document.querySelector('#tip').textContent")
    page.js(f"document.querySelector('{HEAT}').focus()")
    page.press("ArrowDown", 40)
    page.wait("document.querySelector('#heat-said').textContent.includes('timeline below')")
    metrics = page.js("[...document.querySelector('#heat-metric').options].map(o => o.textContent)")
    assert "step, ms" in metrics


def test_scripts_print_numbers_as_tables_do(shown):
    values = [0, 2700, 41.23, 4.311, 0.0523, 8.3e-11, -4.311, 0.9998, 9.997, 1234567]
    page = shown("single")
    assert [page.js(f"aorta.number({value!r})") for value in values] == [number(value) for value in values]


def test_quartiles_are_those_of_the_box(shown):
    """Of steps of 98.5 and 100.5 ms: 99, 99.5 and 100."""
    page = shown("single")
    page.js("document.querySelector('#distributions').scrollIntoView()")
    page.wait("!!document.querySelector('#distribution-chart .boxes')")
    box = page.js(
        "(() => { const t = document.querySelector('#distribution-chart').data.find(t => t.type === 'box');"
        " return [t.q1[0], t.median[0], t.q3[0], t.y[0]]; })()"
    )
    assert box[:3] == pytest.approx(np.percentile(box[3], (25, 50, 75)).tolist())


def test_every_link_of_the_navigation_has_its_section(shown):
    for name in ("compared", "single", "without-details"):
        page = shown(name)
        links = page.js("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
        assert links
        assert page.js(f"{json.dumps(links)}.every(href => document.querySelector(href))")


STEPS = "#steps-canvas"
TITLE = "document.querySelector('#timeline-sums summary').textContent"


def test_a_click_leads_from_a_rank_to_its_steps_and_to_the_timeline_of_one(shown):
    """29 judged steps of 2 ranks; the timeline keeps 4 and up to 24 more of them."""
    page = shown("single")
    assert page.js(MARKS.format(STEPS)) == 29
    page.click("#time tr[data-rank='1'] button")
    said = "document.querySelector('#steps-said').textContent"
    assert page.js(said).startswith("Rank 1: a column for each step.")
    assert page.js("document.querySelector('#steps-rank').selectedOptions[0].textContent") == "1"
    page.hover(*page.centre(STEPS))
    page.wait("document.querySelector('#tip').textContent.startsWith('rank 1, step 1')")
    page.js(f"document.querySelector('{STEPS}').focus()")
    page.press("ArrowRight", 39)
    assert page.js(said).startswith("rank 1, step 1: ")
    assert "compute" in page.js(said)
    page.press("Enter", 13)
    page.wait(said + ".includes('The timeline below shows step 1.')")
    assert page.js("document.querySelector('#timeline-step').selectedOptions[0].textContent").endswith("(1)")


def test_calls_are_found_by_name_and_summed(shown):
    """Two ranks with ten gathers each, 12 ms in sum on each rank."""
    page = shown("single")
    page.centre(CANVAS)
    page.js("document.querySelector('#timeline-find').focus()")
    for key in "gather":
        page.press(key)
    page.wait(TITLE + ".includes('20 spans with \u201cgather\u201d')")  # not after the first letters alone
    assert "\u201cgather\u201d, 24.0 ms" in page.js(TITLE)
    page.press("Enter", 13)
    assert "all_gather" in page.js("document.querySelector('#timeline-said').textContent")


def test_a_selected_range_is_summed_by_rank(shown):
    page = shown("single")
    page.centre(CANVAS)
    drag = """(() => {
      const canvas = document.querySelector('#timeline-canvas'), box = canvas.getBoundingClientRect();
      const send = (kind, share) => canvas.dispatchEvent(new PointerEvent(kind, {
        clientX: box.left + 150 + share * (box.width - 150), clientY: box.top + 40, shiftKey: true,
        pointerId: 1,
      }));
      canvas.setPointerCapture = () => {};
      send('pointerdown', 0.1); send('pointermove', 0.6); send('pointerup', 0.6); })()"""
    page.js(drag)
    page.wait(TITLE + ".startsWith('Sums of what is selected: ')")
    low, high = (float(text) for text in page.js(TITLE).split(": ")[1].removesuffix(" ms").split(" to "))
    rows = page.js(
        "[...document.querySelectorAll('#timeline-sums table:first-child tbody tr')].slice(0, 2)"
        ".map(row => [...row.cells].slice(1).map(cell => Number(cell.textContent)))"
    )
    assert [sum(row) for row in rows] == pytest.approx([high - low] * 2, rel=0.02)
