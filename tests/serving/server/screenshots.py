"""Makes the screenshots of docs/guides/dashboard.md.

`python -m tests.serving.server.screenshots docs/assets`
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.serving.server.browser import Browser
from tests.serving.server.fake_service import FakeBackend, application, metrics_with_a_past
from tests.serving.server.test_dashboard import start

QUESTION = 'Is this a complaint? "Your invoice of 12 March is still open."'
# Name -> width and height in pixels, dark, whether the whole page is taken.
VIEWS = {
    "dashboard": (1280, 900, False, True),
    "dashboard-phone": (390, 1010, True, False),
}
_COLOURS = 256


def main(folder):
    backend = FakeBackend()
    address, stop = start(application(backend, metrics_with_a_past(backend)))
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        for name, (width, height, dark, whole) in VIEWS.items():
            browser.view(width, height, dark=dark)
            browser.open(address)
            browser.wait("document.querySelectorAll('.mark').length > 20")
            browser.value(f"document.getElementById('chat-text').value = {QUESTION!r}")
            browser.value("document.getElementById('chat-slo').selectedIndex = 4")
            browser.value("document.getElementById('chat-send').click()")
            browser.wait("document.querySelector('.told') !== null")
            file = folder / f"{name}.png"
            browser.screenshot(file, whole=whole)
            with Image.open(file) as image:
                small = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
            small.save(file, optimize=True)
            print(file, file.stat().st_size)
        browser.close()
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
