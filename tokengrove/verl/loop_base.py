"""The base class of agent loops, in the form that verl's documentation prints and in the form of verl 0.9.

A loop is created for one sample and runs in one session. Its only access to the server is the server manager of that
session.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from tokengrove.client.image_urls import ImageUrls, images_of
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.config import Config
from tokengrove.rollout.server_tokenizer import ServerTokenizer
from tokengrove.verl.continuous_tokens import ContinuousTokens
from tokengrove.verl.outputs import AgentLoopOutput
from tokengrove.verl.settings import DictConfigWrap
from tokengrove.verl.settings import trainer_config as _trainer_config
from tokengrove.verl.tool_parsers import ToolParser, server_of_loop

_logger = logging.getLogger(__name__)


class AgentLoopBase(ContinuousTokens):
    """Subclasses define `run`, and may define `init_class`, which is called for each loop.

    Printed form: `__init__(self, config, server_manager, tokenizer)`, `run(self, messages, sampling_params)`. Form of
    verl 0.9: `__init__(self, *args, **kwargs)` with the names below, `run(self, sampling_params, **kwargs)`, where
    `kwargs` are the columns of the sample: `raw_prompt`, `tools_kwargs`, `extra_info` and so on.

    `config` is the trainer's configuration (`Config`), `rollout_config` its `actor_rollout_ref.rollout`. `tokenizer` is
    a tokenizer of transformers or a `ServerTokenizer`. `loop` is the running event loop. `processor`, `dataset_cls` and
    `hf_model_type` are stored for subclasses and not used here, since the server knows its model. `image_urls` contains
    the images that were sent.
    """

    _class_initialized: ClassVar[bool] = False

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: type | None = None,
        data_config: object = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        *,
        config: object = None,
        **kwargs: Any,
    ) -> None:
        self.config: Config = _trainer_config(config if trainer_config is None else trainer_config)
        self.rollout_config: Config = self.config.actor_rollout_ref.rollout
        self.data_config: Any = data_config.config if isinstance(data_config, DictConfigWrap) else self.config.data
        self.server_manager = server_manager
        self.image_urls = getattr(server_manager, "image_urls", None) or ImageUrls()
        server_of_loop.set(next(iter(getattr(server_manager, "server_handles", ())), None))
        tokenizer = lists_ids(tokenizer)
        self.tokenizer, self.processor, self.tool_list = tokenizer, processor, getattr(tools, "tools", tools)
        self.dataset_cls, self.hf_model_type = dataset_cls, hf_model_type
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.mm_processor_kwargs = dict(self.data_config.get("mm_processor_kwargs") or {})
        self.loop = asyncio.get_running_loop()
        taken = accepted(self.init_class, kwargs)
        if unknown := sorted(kwargs.keys() - taken.keys()):
            raise TypeError(f"{type(self).__name__} takes no {unknown[0]!r}; its init_class takes none either")
        self.init_class(self.config, tokenizer, **taken)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give each class its own `_class_initialized`: its base may have been initialized with other settings."""
        super().__init_subclass__(**kwargs)
        cls._class_initialized = False

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Prepare the shared state of all loops of the class. Called for each loop; sets `_class_initialized`."""
        cls._class_initialized = True

    @classmethod
    def get_tool_parser(cls, name: str | None, tokenizer: Any = None) -> ToolParser:
        """The tool parser of a name. The `init_class` that verl's documentation prints calls this."""
        return ToolParser.get_tool_parser(name, tokenizer)

    @abstractmethod
    async def run(self, *args: Any, **kwargs: Any) -> AgentLoopOutput:
        """Run the sample, in either of the two forms."""

    async def build_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """The ids of the first prompt, from the loop's tokenizer, or from the server if the loop has none of its own.

        Prompts with images are always tokenized by the server. A prompt longer than `prompt_length` loses its
        beginning, with a warning, as in verl; a prompt with images raises InvalidRequest instead, also as in verl.
        """
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        messages, images = await self.with_urls(messages), images_of(messages)
        if images or self.tokenizer is None or isinstance(self.tokenizer, ServerTokenizer):
            if self.apply_chat_template_kwargs:
                options["chat_template_kwargs"] = self.apply_chat_template_kwargs
            ids: list[int] = await self.server_manager.tokenize(list(messages), **options)
        else:
            ids = await asyncio.to_thread(self._render, list(messages), options)
        most: int = self.rollout_config.prompt_length
        if len(ids) <= most:
            return ids
        if images:
            message = (
                f"a prompt with images has {len(ids)} tokens, but actor_rollout_ref.rollout.prompt_length is {most}"
            )
            raise InvalidRequest(f"{message}; use smaller images, or raise it", param="prompt_length")
        _logger.warning("a prompt of %d tokens loses its beginning: rollout.prompt_length is %d", len(ids), most)
        return ids[-most:]

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of messages, for loops written for verl before 0.9.

        `remove_system_prompt`: leave out what the template writes before a conversation, for messages that are appended
        to an answer. `images`: as in `with_urls`. Other arguments are passed to the chat template.
        """
        ContinuousTokens.build_sglang_video_payload(videos, {})
        shown = await self.with_urls(messages, images)
        own = self.tokenizer
        if own is None or (images_of(shown) and not isinstance(own, ServerTokenizer)):
            message = "apply_chat_template with images needs the server's tokenizer: create the loop without one"
            raise InvalidRequest(message, param="tokenizer")
        how = {**self.apply_chat_template_kwargs, **kwargs, **({"tools": list(tools)} if tools else {})}
        whole = partial(own.apply_chat_template, shown, add_generation_prompt=True, tokenize=True, **how)
        ids = list(await asyncio.to_thread(whole))
        if not remove_system_prompt:
            return ids
        start = partial(own.apply_chat_template, [{}], add_generation_prompt=False, tokenize=True)
        return ids[len(await asyncio.to_thread(start)) :]

    def _render(self, messages: list[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        how = {"add_generation_prompt": True, "tokenize": True, **options, **self.apply_chat_template_kwargs}
        found = self.tokenizer.apply_chat_template(messages, **how)
        return [int(each) for each in (found["input_ids"] if isinstance(found, Mapping) else found)]


def lists_ids(tokenizer: Any) -> Any:
    """A tokenizer whose `apply_chat_template` returns a list of ids, as loops expect.

    By default transformers returns a dict since release 5. `tokenizer` itself is not changed; a copy is returned.
    """
    if tokenizer is None:
        return None
    render = tokenizer.apply_chat_template
    parameter = inspect.signature(render).parameters.get("return_dict")
    if parameter is None or not parameter.default:
        return tokenizer
    copied = copy.copy(tokenizer)
    copied.apply_chat_template = functools.partial(render, return_dict=False)
    return copied


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(given)
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return {name: value for name, value in given.items() if name in names}


async def run_loop(loop: Any, sampling_params: dict[str, Any], sample: Mapping[str, Any]) -> AgentLoopOutput:
    """Call `run` of a loop in the form of its signature, and check its result.

    `sample`: the columns of the sample, with `raw_prompt`. Raises InvalidRequest if the result is not an
    AgentLoopOutput, or an invalid one.
    """
    messages = [dict(message) for message in sample["raw_prompt"]]
    if "messages" in inspect.signature(loop.run).parameters:
        given = {"messages": messages, "sampling_params": sampling_params, **accepted(loop.run, sample)}
    else:
        given = {"sampling_params": sampling_params, **accepted(loop.run, {**sample, "raw_prompt": messages})}
    output = await loop.run(**given)
    if not isinstance(output, AgentLoopOutput):
        output = _converted(output, type(loop).__name__)
    output.check()
    return output


def _converted(output: Any, name: str) -> AgentLoopOutput:
    """The output of a loop that uses verl's own output class."""
    dump = getattr(output, "model_dump", None)
    if not callable(dump):
        raise InvalidRequest(f"{name}.run returned {type(output).__name__!r} instead of an AgentLoopOutput")
    known = AgentLoopOutput.__dataclass_fields__
    fields = {field: getattr(output, field) for field in dump() if field in known}
    return AgentLoopOutput(**fields)
