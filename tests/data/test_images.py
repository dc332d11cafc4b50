"""Images in class folders: what is read, how, and what is refused before training."""

import os
import random
import struct
import zlib
from pathlib import Path

import image_script
import pytest
from PIL import Image

from collab_heads.data.images import from_folders, read_image
from collab_heads.errors import DataError

RED, WHITE, GREY = (255, 0, 0), (255, 255, 255), (90, 90, 90)


@pytest.fixture
def folders(tmp_path):
    """Two splits of three classes."""
    splits = {"train": 3, "validation": 2}
    return {
        split: image_script.write_images(tmp_path / split, count, seed)
        for seed, (split, count) in enumerate(splits.items())
    }


def test_order_goes_round_the_classes(folders):
    (folders["train"] / "square" / "002.png").unlink()
    data = from_folders(folders)
    assert data.task.labels == ("disc", "line", "square")
    train = data.splits["train"]
    assert train["label"] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [Path(name).parent.name for name in train["file"][:4]] == ["disc", "line", "square", "disc"]
    assert data.first({"train": 3, "validation": None}).splits["train"]["label"] == [0, 1, 2]
    assert data.splits["validation"]["label"] == [0, 1, 2, 0, 1, 2]


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    for split in ("train", "validation"):
        image_script.write_images(tmp_path / split, 1, 0)
        for old, new in (("disc", "10"), ("line", "9"), ("square", "2")):
            (tmp_path / split / old).rename(tmp_path / split / new)
    data = from_folders({split: tmp_path / split for split in ("train", "validation")})
    assert data.task.labels == ("2", "9", "10")


def test_a_changed_image_has_another_digest(folders):
    before = from_folders(folders).splits["train"]["sha256"]
    image_script.draw("disc", random.Random(9)).save(folders["train"] / "disc" / "000.png")
    after = from_folders(folders).splits["train"]["sha256"]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False] + [True] * 8


def test_hidden_files_and_those_of_other_types_are_passed_over(folders):
    for name in (".DS_Store", "notes.txt"):
        (folders["train"] / "disc" / name).write_bytes(b"x")
        (folders["train"] / name).write_bytes(b"x")
    assert len(from_folders(folders).splits["train"]["file"]) == 9


def cut(folder: Path) -> None:
    path = folder / "disc" / "001.png"
    path.write_bytes(path.read_bytes()[:-30])


def empty(folder: Path) -> None:
    for path in (folder / "line").iterdir():
        path.unlink()


def only_text(folder: Path) -> None:
    empty(folder)
    (folder / "line" / "notes.txt").write_text("x")


def one_class(folder: Path) -> None:
    for each in (folder, folder.with_name("validation")):
        for name in ("line", "square"):
            for path in (each / name).iterdir():
                path.unlink()
            (each / name).rmdir()


def deep(folder: Path) -> None:
    Image.new("I;16", (4, 4)).save(folder / "disc" / "000.png")


def png(channels: int, colour: int, bits: int) -> bytes:
    """A picture of 4 by 4, which Pillow does not write with 16 bits."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = 4 * (b"\0" + bytes(4 * channels * bits // 8))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


COLOURS = {"RGB": (3, 2), "LA": (2, 4), "RGBA": (4, 6)}  # channels, and PNG's number


@pytest.mark.parametrize("name", COLOURS)
def test_colours_of_16_bits_are_refused(name, tmp_path):
    """Pillow reads them into 8 without a word."""
    (tmp_path / "8.png").write_bytes(png(*COLOURS[name], 8))
    assert read_image(tmp_path / "8.png").size == (4, 4)
    (tmp_path / "16.png").write_bytes(png(*COLOURS[name], 16))
    with pytest.raises(DataError, match=r"16\.png has more than 8 bits a channel"):
        read_image(tmp_path / "16.png")


def test_of_other_types_the_depth_is_known_too(tmp_path):
    (tmp_path / "8.ppm").write_bytes(b"P6\n2 2\n100\n" + bytes(12))
    Image.new("RGB", (300, 2)).save(tmp_path / "wide.bmp")
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)  # 16 bits for all three colours
    header = struct.pack("<2sIHHI IiiHHIIiiII", b"BM", 70, 0, 0, 66, 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    (tmp_path / "565.bmp").write_bytes(header + masks + bytes(4))
    for name, size in (("8.ppm", (2, 2)), ("wide.bmp", (300, 2)), ("565.bmp", (2, 1))):
        assert read_image(tmp_path / name).size == size
    (tmp_path / "16.ppm").write_bytes(b"P6\n2 2\n65535\n" + bytes(24))
    with pytest.raises(DataError, match=r"16\.ppm has more than 8 bits a channel"):
        read_image(tmp_path / "16.ppm")


def bad_exif(folder: Path) -> None:
    Image.new("RGB", (4, 4)).save(folder / "disc" / "000.png", exif=b"Exif\0\0zz*\0\x08")


def bytes_as_name(folder: Path) -> None:
    os.rename(folder / "disc" / "000.png", os.fsencode(folder / "disc") + b"/caf\xe9.png")


def one_more(folder: Path) -> None:
    (folder / "x").mkdir()
    image_script.draw("disc", random.Random(0)).save(folder / "x" / "a.png")


BROKEN = {
    "cut": (cut, r"disc/001\.png is a broken image"),
    "empty file": (
        lambda f: (f / "disc" / "000.png").write_bytes(b""),
        r"disc/000\.png is not an image, .*\(0 bytes\)",
    ),
    "text": (lambda f: (f / "disc" / "000.png").write_text("hello"), r"disc/000\.png is not an image, .*\(5 bytes\)"),
    "16 bits": (deep, r"disc/000\.png has more than 8 bits a channel: save it with 8"),
    "bad EXIF": (bad_exif, r"disc/000\.png is a broken image"),
    "not UTF-8": (bytes_as_name, r"disc/caf\\udce9\.png': its name is not UTF-8"),
    "tab": (lambda f: (f / "disc" / "000.png").rename(f / "disc" / "a\tb.png"), r"disc/a\\tb\.png': its name"),
    "empty class": (empty, r"line: the class has no images \(.png"),
    "class of texts": (only_text, r"line: the class has no images .*; it has 1 other file\(s\), such as notes\.txt"),
    "one class": (one_class, r"all images are of the class 'disc'"),
    "other class": (lambda f: (f / "line").rename(f / "cross"), "only here: line; not here: cross"),
    "missing class": (one_more, "not here: x"),
    "loose image": (lambda f: image_script.draw("disc", random.Random(0)).save(f / "a.png"), r"a\.png is of no class"),
    "deeper folder": (lambda f: (f / "disc" / "more").mkdir(), r"disc/more is a folder inside a class"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_learned_from_is_refused_and_named(name, folders):
    damage, message = BROKEN[name]
    damage(folders["train"])
    with pytest.raises(DataError, match=message):
        from_folders(folders)


def test_missing_folders_are_named(folders, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="gone is not a folder: expected one with a folder of images for every class"):
        from_folders({**folders, "train": tmp_path / "gone"})
    with pytest.raises(DataError, match=r"none has no class folders: expected .*none/CLASS/ with images"):
        from_folders({**folders, "validation": tmp_path / "none"})


def test_a_bomb_is_refused(folders, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(DataError, match=r"disc/000\.png is a broken image: .*decompression bomb"):
        from_folders(folders)


def saved(image: Image.Image, path: Path, **options) -> Image.Image:
    """As it is read again."""
    image.save(path, **options)
    return read_image(path)


def test_every_mode_becomes_rgb(tmp_path):
    grey, palette = Image.new("L", (4, 4), 90), Image.new("RGB", (4, 4), RED).convert("P")
    assert saved(grey, tmp_path / "grey.png").getpixel((0, 0)) == GREY
    assert saved(palette, tmp_path / "palette.gif").getpixel((0, 0)) == RED
    assert saved(Image.new("1", (4, 4), 1), tmp_path / "bits.png").getpixel((0, 0)) == WHITE
    assert saved(Image.new("CMYK", (4, 4)), tmp_path / "print.jpg").getpixel((0, 0)) == WHITE
    assert {read_image(path).mode for path in tmp_path.iterdir()} == {"RGB"}


def test_transparent_parts_are_white(tmp_path):
    image = Image.new("RGBA", (4, 4), (*RED, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    found = saved(image, tmp_path / "alpha.png")
    assert (found.mode, found.getpixel((0, 0)), found.getpixel((1, 1))) == ("RGB", WHITE, RED)
    grey = Image.new("LA", (4, 4), (0, 0))
    assert saved(grey, tmp_path / "grey.png").getpixel((0, 0)) == WHITE
    palette = Image.new("P", (4, 4), 0)
    assert saved(palette, tmp_path / "palette.png", transparency=0).getpixel((0, 0)) == WHITE


def test_images_are_turned_as_their_camera_says(tmp_path):
    image, exif = Image.new("RGB", (4, 2), RED), Image.Exif()
    exif[0x0112] = 6  # its left edge is the top
    image.save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png").size == (2, 4)


def test_of_an_animation_the_first_picture_counts(tmp_path):
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), WHITE)
    first.save(tmp_path / "moving.gif", save_all=True, append_images=[second])
    assert read_image(tmp_path / "moving.gif").getpixel((0, 0)) == RED


def test_what_vanishes_in_training_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.png: No such file"):
        read_image(tmp_path / "gone.png")
