"""Pre-trains a GPT: `python pretrain_gpt.py --config configs/demo.yaml`, or the same under torchrun."""

from megalite.config.script import run_script

if __name__ == "__main__":
    run_script("pretrain_gpt.py")
