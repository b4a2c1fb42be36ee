import ast
import subprocess
import sys
from pathlib import Path

import servax.bucketing as bucketing


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(set(bucketing.__all__)) == sorted(bucketing.__all__)
    for name in bucketing.__all__:
        assert getattr(bucketing, name).__doc__ or name == "Observed", name


def test_all_errors_share_one_root_that_is_a_value_error() -> None:
    errors = [getattr(bucketing, name) for name in bucketing.__all__ if name.endswith("Error")]
    assert len(errors) == 11
    assert all(issubclass(error, bucketing.BucketingError) for error in errors)
    assert issubclass(bucketing.DoesNotFit, bucketing.BucketingError)
    assert issubclass(bucketing.BucketingError, ValueError)


def test_only_numpy_and_the_standard_library_are_imported() -> None:
    folder = Path(bucketing.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path
                names = [node.module or ""] if node.level == 0 else []
            for name in names:
                top = name.partition(".")[0]
                assert top in {"numpy", *sys.stdlib_module_names} - {"time", "threading", "datetime"}, path


def test_the_folder_imports_without_jax() -> None:
    code = "import sys; sys.modules['jax'] = None; import servax.bucketing as b; b.exact().ladder(3)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
