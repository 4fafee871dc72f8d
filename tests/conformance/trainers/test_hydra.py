"""Configurations of ROLL come out as hydra and OmegaConf compose and resolve them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.packages import package
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import AgenticConfig, compose
from tokengrove.rollout.config import Config

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
FILES = {
    "shared/envs.yaml": (
        "steps: 3\nkeep: {a: 1, b: [1]}\ncustom_env:\n  Boxes:\n    env_type: boxes\n    max_steps: ${steps}\n"
        "    env_config: {rate: 1e-3, look: {0: W, 1: '.'}, day: 2024-01-02, on: yes, octal: 010, hex: 0x1F, no: ~}\n"
    ),
    "run/main.yaml": (
        "defaults:\n  - ../shared/envs@_here_\n  - ../shared/envs@deep.er\n  - db: mysql\n  - tools: [x, y]\n"
        "  - db@second: postgres\n  - optional db@third: none\n  - headed/one\n  - _self_\n"
        "hydra: {run: {dir: .}}\nsteps: 7\nkeep: {b: [2], c: '${keep.a}-${steps}'}\nlist: [4, {x: '${list.0}'}]\n"
        "custom_envs:\n  Boxes:\n    ${custom_env.Boxes}\nnumber: ${oc.decode:'[1,2]'}\n"
        "sequence_length: 64\nrollout_batch_size: 2\nactor_infer: {generating_args: {temperature: 0.5}}\n"
        "train_env_manager: {num_env_groups: 1, group_size: 2, tags: [Boxes], num_groups_partition: [1]}\n"
    ),
    "run/outer.yaml": "defaults:\n  - main\n  - override db: postgres\nsteps: 9\n",
    "run/db/mysql.yaml": "defaults: [timeouts]\nport: 3306\n",
    "run/db/postgres.yaml": "port: 5432\n",
    "run/db/timeouts.yaml": "timeout: 1\nport: 0\n",
    "run/tools/x.yaml": "names: [x]\nof: {x: 1}\n",
    "run/tools/y.yaml": "names: [y]\nof: {y: 1}\n",
    "run/headed/one.yaml": "# @package _global_\nkeep: {h: 1}\n",
}
OVERRIDES = [
    *("steps=5", "+a1=b", "~seconds", "++keep={z: 1}", "+l=[1,a,'x y',1e-3,{k:v,z: 2}]", "+d={a:1,b:[x,y]}", "+e=yes"),
    *("+f=null", "+g=1_000", "+h=-1.5e3", "+i=${steps}", "+j=True", "+k=", "+m='${steps} x'", "+n=0x10", "+p=a b"),
    *("+o=[${steps},b]", "+q=inf", "+r.s.t=1", "list.0=8", "~keep.a", "db=postgres", "+w=a-b/c:d", '+y="q\'"', "+u={}"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("configuration")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "run"


def composed(folder: Path, name: str, overrides: list[str]) -> Any:
    hydra = package("hydra")
    with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
        return hydra.compose(config_name=name, overrides=overrides)


@pytest.mark.parametrize("name", ["main", "outer"])
@pytest.mark.parametrize("override", [None, *OVERRIDES])
def test_files_and_overrides_make_what_hydra_makes(folder: Path, name: str, override: str | None) -> None:
    overrides = [override] if override is not None else []
    try:
        container = package("omegaconf").OmegaConf.to_container(composed(folder, name, overrides), resolve=True)
    except Exception:  # of several packages
        with pytest.raises(InvalidRequest):
            Config(compose(folder / name, overrides)).to_dict()
    else:
        assert Config(compose(folder / name, overrides)).to_dict() == container


def test_a_configuration_of_omegaconf_is_read_as_its_file(folder: Path) -> None:
    container = AgenticConfig(composed(folder, "main", ["+seed=1"]))
    assert container.to_dict() == AgenticConfig.from_yaml(folder / "main", ["seed=1"]).to_dict()
    assert container.train_env_manager.env_configs[0][1].config.look == {0: "W", 1: "."}
