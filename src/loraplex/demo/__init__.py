"""The embedded model: a tiny Llama and its adapters, trained by ``tools/train_demo.py``."""

from loraplex.demo.model import NAME, demo_adapters, demo_folder, load_demo_model

__all__ = ["NAME", "demo_adapters", "demo_folder", "load_demo_model"]
