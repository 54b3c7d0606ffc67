"""A byte-level tokenizer with a few hundred tokens and a ChatML template, made in memory: small, yet like real ones."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from service.chat_template import ChatTemplate
from service.tokenization import Tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2  # <|im_end|>
CHATML = (
    "{% for message in messages %}{% if message['content'] == 'refuse me' %}{{ raise_exception('never') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog.  Two spaces,\n\n    an indented line of code.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z: the alphabet, the words and the answer.",
]


@functools.cache
def tiny_tokenizer(*, with_template: bool = True, with_effort: bool = False) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    source = "effort: {{ reasoning_effort }}\n" + CHATML if with_effort else CHATML
    return Tokenizer(backend, config, ChatTemplate(source) if with_template else None)
