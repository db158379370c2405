"""The watch that tests of pages rely on."""

from pathlib import Path

from browser import Opened


def test_what_a_page_says_and_asks_for_is_seen(page: Opened, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<script>console.error('said'); setTimeout(() => { throw Error('thrown') })</script>"
        "<img src='http://elsewhere.example/a.png'><img src='data:image/gif;base64,R0lGODlh'>"
    )
    watched = page(390, dark=True)
    with watched.page.expect_event("pageerror"):
        watched.page.goto(file.as_uri())
    assert {"said", "thrown"} <= set(watched.errors)
    assert watched.outside == ["http://elsewhere.example/a.png"]
    assert file.as_uri() in watched.requests
    assert watched.page.evaluate(
        "[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]"
    ) == [390, True]
