import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(tool, *arguments):
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def read_pair(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
