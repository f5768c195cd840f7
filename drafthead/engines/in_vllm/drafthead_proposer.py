"""The name by which vLLM imports ``proposer.Proposer``.

If drafthead is not installed in vLLM's environment, the package that contains this file is used. Its folder is not put
on the path, because a checkout has folders like ``data``.
"""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def load_package() -> None:
    folder = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location(folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)


if find_spec("drafthead") is None:
    load_package()
Proposer = import_module("drafthead.engines.in_vllm.proposer").Proposer
