import json
import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from PIL import Image

from tidegate.lab.tasks.image import ImageTask, image_task


def save_image(path, *, mode="RGB", size=(20, 30), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size=shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "animals"
    for number in range(45):
        save_image(root / ("cat", "dog", "owl")[number % 3] / f"{number}.png", seed=number)
    return root


def whole(batches):
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def rows_of(images):
    return {image.numpy().tobytes() for image in images}


# Digits


def test_digits_are_small_gray_images_of_ten_classes():
    data = image_task().load()
    inputs, targets = data.batch(seed=0, step=0, size=33)
    assert inputs.shape == (33, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert targets.shape == (33,)
    assert targets.dtype == torch.int64
    assert data.vocab_size == data.facts["num_classes"] == 10
    assert data.facts["channels"] == 1
    assert data.long() is None
    assert data.bytes_per_token is None


def test_a_fifth_of_each_class_is_held_out():
    data = image_task().load()
    held_out = whole(data.validation())[1].bincount(minlength=10)
    training = data.batch(seed=0, step=0, size=data.facts["num_training_images"]).targets.bincount(minlength=10)
    assert ((held_out / (held_out + training) - 0.2).abs() < 0.005).all()
    assert int(held_out.sum() + training.sum()) == 1797


def test_no_held_out_image_is_trained_on():
    data = image_task().load()
    training = data.batch(seed=0, step=0, size=data.facts["num_training_images"]).inputs
    held_out = whole(data.validation())[0]
    assert len(rows_of(held_out)) > 300
    assert rows_of(held_out).isdisjoint(rows_of(training))


def test_training_images_are_standardised_by_their_own_statistics():
    data = image_task().load()
    images = data.batch(seed=0, step=0, size=data.facts["num_training_images"]).inputs.double()
    assert_close(images.mean(), torch.tensor(0.0), dtype="float32")
    assert_close(images.std(correction=0), torch.tensor(1.0), dtype="float32")
    assert abs(float(whole(data.validation())[0].mean())) > 1e-4


def test_digits_without_their_package_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with rejects("data", hint="scikit-learn: pip install 'tidegate[lab]'"):
        image_task("digits")


# Batches


def test_every_image_comes_once_before_any_comes_again(folder):
    data = image_task(str(folder), image_size=8).load()
    count = data.facts["num_training_images"]
    assert count == 36
    steps = [data.batch(seed=1, step=step, size=12).inputs for step in range(6)]
    epochs = [torch.cat(steps[:3]), torch.cat(steps[3:])]
    assert [len(rows_of(epoch)) for epoch in epochs] == [count, count]
    assert rows_of(epochs[0]) == rows_of(epochs[1])
    assert not torch.equal(epochs[0], epochs[1])


def test_a_batch_reaches_over_the_end_of_an_epoch(folder):
    data = image_task(str(folder), image_size=8).load()
    twice = data.batch(seed=1, step=0, size=72).inputs
    assert len(rows_of(twice)) == 36
    assert torch.equal(twice[36:], data.batch(seed=1, step=1, size=36).inputs)


def test_a_batch_depends_on_seed_and_step_alone():
    data = image_task().load()
    first = data.batch(seed=3, step=5, size=4).inputs
    data.batch(seed=0, step=0, size=9)
    assert torch.equal(first, data.batch(seed=3, step=5, size=4).inputs)
    assert not torch.equal(first, data.batch(seed=3, step=6, size=4).inputs)
    assert not torch.equal(first, data.batch(seed=4, step=5, size=4).inputs)


def test_the_probe_is_eight_held_out_images_of_different_classes():
    data = image_task().load()
    inputs, targets = data.probe()
    assert len(set(targets.tolist())) == 8
    assert rows_of(inputs) <= rows_of(whole(data.validation())[0])


# Folders


def test_folders_are_classes_in_the_order_of_their_names(folder):
    (folder / ".cache").mkdir()
    (folder / "readme.txt").write_text("about")
    (folder / "cat" / "notes.txt").write_text("about cats")
    (folder / "cat" / ".hidden.png").write_bytes(b"no image")
    data = image_task(str(folder)).load()
    assert data.facts["classes"] == ["cat", "dog", "owl"]
    assert data.chance_loss == math.log(3)
    assert data.batch(seed=0, step=0, size=2).inputs.shape == (2, 3, 32, 32)
    assert whole(data.validation())[1].bincount().tolist() == [3, 3, 3]


def test_images_are_gray_if_all_of_them_are(tmp_path):
    for number in range(8):
        save_image(tmp_path / "ab"[number % 2] / f"{number}.png", mode="L", seed=number)
    assert image_task(str(tmp_path), image_size=8).load().facts["channels"] == 1
    save_image(tmp_path / "a" / "color.png", seed=99)
    assert image_task(str(tmp_path), image_size=8).load().facts["channels"] == 3


def test_copies_of_an_image_are_on_the_same_side(tmp_path):
    for number in range(60):
        save_image(tmp_path / "ab"[number % 2] / f"{number}.png", seed=number % 20)
    data = image_task(str(tmp_path), image_size=8).load()
    training = data.batch(seed=0, step=0, size=data.facts["num_training_images"]).inputs
    assert rows_of(training).isdisjoint(rows_of(whole(data.validation())[0]))


def test_a_channel_without_spread_stays_finite(tmp_path):
    for number in range(8):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 9), (7, 10 * number, 30 * number)).save(path)
    images = image_task(str(tmp_path), image_size=4).load().batch(seed=0, step=0, size=6).inputs
    assert images.isfinite().all()
    assert (images[:, 0] == 0).all()


def test_a_folder_can_be_moved_and_not_changed(folder, tmp_path):
    before = image_task(str(folder), image_size=8)
    after = image_task(str(folder.rename(tmp_path / "moved")), image_size=8)
    assert before.to_dict() != after.to_dict()
    assert before.to_dict(location=False) == after.to_dict(location=False)
    (tmp_path / "moved" / "cat" / "0.png").unlink()
    with rejects("data", hint=f"has changed: its fingerprint was {after.fingerprint}"):
        after.load()


def test_a_folder_of_a_comparison_is_no_class(folder, records):
    before = image_task(str(folder), image_size=8)
    records(folder / "out")
    save_image(folder / "out" / "curve.png")
    records(folder / "owl" / "out")
    save_image(folder / "owl" / "out" / "curve.png")
    assert image_task(str(folder), image_size=8) == before
    assert before.load().facts["classes"] == ["cat", "dog", "owl"]


def test_facts_are_json_and_images_are_loaded_once(folder):
    task = image_task(str(folder), image_size=8)
    assert json.loads(json.dumps(task.load().facts)) == task.load().facts
    assert replace(task).load() is task.load()
    assert "Images of animals, 8 × 8 in color, 3 classes: 36 training images" in task.load().description


# Bad data


def test_a_folder_that_is_none_is_refused(tmp_path):
    with rejects("data", hint="does not exist") as rejected:
        image_task("nowhere")
    assert rejected.value.got == "nowhere"
    (tmp_path / "one").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with rejects("data") as rejected:
            image_task(str(path))
        assert rejected.value.got == str(path)
        assert "one folder of images for each of two or more classes" in rejected.value.expected


def test_a_class_needs_two_different_images(folder):
    save_image(folder / "pig" / "1.png")
    with rejects("data", hint="pig has 1;"):
        image_task(str(folder))
    save_image(folder / "pig" / "2.png")
    with rejects("data", hint="'pig' has too few"):
        image_task(str(folder)).load()


def test_an_image_of_far_more_pixels_than_its_file_has_bytes_is_refused_before_it_is_decoded(folder, monkeypatch):
    Image.new("P", (4000, 3000)).save(folder / "cat" / "vast.gif")
    convert = Image.Image.convert

    def convert_small(image, mode):
        assert image.size != (4000, 3000), "it was decoded"
        return convert(image, mode)

    monkeypatch.setattr(Image.Image, "convert", convert_small)
    with rejects("data", hint="declares 4000 × 3000 pixels") as rejected:
        image_task(str(folder)).load()
    assert rejected.value.got == folder / "cat" / "vast.gif"


def test_a_large_image_in_a_large_file_is_read(folder):
    save_image(folder / "cat" / "photo.png", size=(4000, 3000))
    image_task(str(folder)).load()


def test_a_broken_image_is_named(folder):
    (folder / "cat" / "broken.png").write_bytes(b"no image")
    with rejects("data", hint="remove it") as rejected:
        image_task(str(folder))
    assert rejected.value.got == folder / "cat" / "broken.png"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"source": "x", "image_size": 0}, "image_size"), ({"validation_share": 0}, "validation_share")],
)
def test_impossible_options_are_refused(options, field):
    with rejects(field):
        ImageTask(**options)


def test_a_program_is_no_image(folder, monkeypatch):
    def run(*_, **__):
        raise AssertionError("a program was run")

    monkeypatch.setattr("subprocess.check_call", run)
    monkeypatch.setattr("subprocess.Popen", run)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    place = next(path for path in folder.iterdir() if path.is_dir())
    (place / "drawing.eps").write_bytes(postscript)
    assert image_task(str(folder)).fingerprint
    (place / "drawing.png").write_bytes(postscript)
    with rejects("data", hint="Supported formats are ") as rejected:
        image_task(str(folder))
    assert rejected.value.got == place / "drawing.png"


@pytest.mark.parametrize(
    "content", [b"II*\0\x08\0\0\0\xff\xff" + bytes(99), b"BM" + b"\xff" * 60, b"RIFF\xff\xff\xff\xffWEBPVP8 "]
)
def test_a_damaged_image_is_named_whatever_its_decoder_raises(folder, content):
    place = next(path for path in folder.iterdir() if path.is_dir())
    (place / "damaged.png").write_bytes(content)
    with rejects("data") as rejected:
        image_task(str(folder))
    assert rejected.value.got == place / "damaged.png"


def test_a_pipe_among_images_is_not_waited_for(folder):
    before = image_task(str(folder)).fingerprint
    os.mkfifo(next(path for path in folder.iterdir() if path.is_dir()) / "pipe.png")
    assert image_task(str(folder)).fingerprint == before
