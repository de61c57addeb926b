"""The package as users get it: what the archives hold, and that the kernels folder disturbs nobody."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KEPT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "data", "build", "dist", "*.egg-info")


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> set[str]:
    """The modules of the package, kernels included under their import name."""
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "megalite").rglob("*.py")}
    kernels = {f"megalite/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    return own | kernels


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tree and the wheel built from that sdist."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("megalite", "kernels"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=KEPT_OUT if name == "kernels" else _no_caches)
    python("-m", "build", "--no-isolation", "--outdir", str(tree / "dist"), cwd=tree)
    return tree / "dist"


_no_caches = shutil.ignore_patterns("__pycache__")


def test_kernels_are_a_link_to_the_top_level_folder() -> None:
    assert (ROOT / "megalite" / "kernels").is_symlink()
    assert (ROOT / "megalite" / "kernels").resolve() == ROOT / "kernels"


def test_wheel_holds_the_whole_package_and_nothing_else(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources() | {"megalite/py.typed", "megalite/kernels/triton/launch_table.csv"}
    assert "megalite/kernels/__init__.py" in names


def test_sdist_holds_real_kernel_files(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    missing = sources() - members.keys()
    assert not missing
    assert all(members[name].isfile() for name in sources())


def test_requirements_leave_apex_out_and_triton_open(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    required = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    names = [line.replace("<", ">").replace(";", ">").replace("=", ">").split(">")[0].strip() for line in required]
    assert "apex" not in names
    assert not any("==" in line.partition(";")[0] for line in required if line.startswith("triton"))
    assert "triton" not in (ROOT / "constraints.txt").read_text().replace("# ", "#").split("\n", 1)[1]


def test_wheel_runs_from_its_archive(archives: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    found = python("-c", "import megalite.kernels, megalite.config; print(megalite.kernels.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(tmp_path)


def test_transformers_imports_beside_the_kernels_folder() -> None:
    # PyPI has a package named kernels that transformers looks for; ours must not be taken for it.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from transformers import LlamaForCausalLM"
    python("-c", code, cwd=ROOT)
