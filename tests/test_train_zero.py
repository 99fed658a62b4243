"""The example of sharded updates prints its table, and trains as the whole optimizer does."""

import re
from pathlib import Path

import pytest
import train_zero

pytestmark = pytest.mark.usefixtures("dtypes_promoted")


@pytest.mark.release
def test_the_example_trains_and_compares(tmp_path, capsys):
    train_zero.main(steps=3, compare=True, out=tmp_path)
    row = re.compile(r"^(sharded|f32) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", re.MULTILINE)
    (name, loss, sent, bits, held), (whole, expected, *others) = row.findall(
        capsys.readouterr().out
    )
    assert (name, whole) == ("sharded", "f32")
    assert float(loss) == pytest.approx(float(expected), rel=2e-3)
    assert (sent, bits) == ("0.87", "3.75")
    assert float(held) < 0.2 * float(others[2])  # 12 bytes of an eighth, and 8 bytes of all
    assert {file.name for file in tmp_path.iterdir()} == {
        "tiny-zero-compare.json", "tiny-zero-compare.png",
    }  # fmt: skip
    assert len(Path(train_zero.__file__).read_text().splitlines()) <= 120
