"""``tightfit init``: a commented file with which users check, prove and report their model."""

from __future__ import annotations

from pathlib import Path

from tightfit.cli.options import Json
from tightfit.cli.output import print_result
from tightfit.errors import BadInput
from tightfit.files import write_atomically

_TEXT = '''"""How tightfit finds your model: a function that returns it with one batch.

    tightfit check {path}:make --budget-ratio 0.5      what it needs; nothing runs
    tightfit report {path}:make --budget-ratio 0.5     a page about the plan: report.html
    tightfit prove {path}:make --budget-ratio 0.5      trains with and without, compares bits
"""

import torch
from torch import nn


def make(batch=None):
    """Return (model, loss, inputs, target).

    `batch` is what --batch and max-batch ask for; None: your usual batch.
    """
    batch = batch or 16

    # Your model, as you would train it.
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        *(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(8)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )

    # One batch of the largest shape you train with. A tuple of positional inputs, or a dict of
    # keyword inputs; only shapes and types count, so random numbers will do.
    inputs = (torch.randn(batch, 3, 64, 64),)
    target = torch.randint(0, 10, (batch,))

    # A function of (output, target).
    return model, nn.functional.cross_entropy, inputs, target


# A model that returns its own loss, as those of Hugging Face do, needs neither loss nor target:
#
# def make(batch=None):
#     from transformers import AutoConfig, AutoModelForCausalLM
#
#     model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
#     tokens = torch.randint(0, model.config.vocab_size, (batch or 4, 512))
#     return model, None, {{"input_ids": tokens, "labels": tokens}}, None
#
# In your training script one line is enough, before the first step:
#
#     tightfit.fit(model, budget="8GiB", optimizer=optimizer)
'''


def init(file: Path = Path("my_model.py"), /, *, json: Json = False) -> int:
    """Write a commented file in which to put one's own model, for check, prove and report.

    ```sh
    tightfit init my_model.py
    tightfit check my_model.py:make --budget-ratio 0.5
    ```

    Parameters
    ----------
    file
        The file to write (.py); one that exists is left as it is.
    """
    if file.suffix != ".py":
        raise BadInput(f"{file} must end in .py: a Python file, such as my_model.py")
    if file.exists():
        raise BadInput(f"{file} exists already and is left as it is: choose another name")
    if not file.parent.is_dir():
        raise BadInput(f"the folder {file.parent} does not exist: create it first")
    write_atomically(file, _TEXT.format(path=file).encode())
    return print_result(
        f"{file} is written: put your model into it, then\n"
        f"  tightfit check {file}:make --budget-ratio 0.5",
        as_json=json,
        status="feasible",
        file=str(file),
    )
