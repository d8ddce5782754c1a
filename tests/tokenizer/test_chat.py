"""Chat templates: what they render, and what a hostile one cannot do."""

import datetime
import time

import pytest

from inferjax.errors import TemplateError
from inferjax.tokenizer import ChatTemplate

CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message.role != 'system' %}\n"
    "{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}\n"
    "    {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": 'Hé <b> "x"'}]


def render(source: str, messages=USER, **context) -> str:
    return ChatTemplate(source).render(messages, **context)


def test_chat_renders_every_message_and_the_prompt_of_the_answer():
    text = render(CHATML, [*USER, {"role": "assistant", "content": "ok"}])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n\n"
        '<|im_start|>user\nHé <b> "x"<|im_end|>\n\n'
        "<|im_start|>assistant\nok<|im_end|>\n\n"
        "<|im_start|>assistant\n"
    )


def test_generation_prompt_can_be_left_out():
    assert not render(CHATML, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hé <b> \\"x\\""}]'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{% endgeneration %}", "a"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ ['a', 1] | join('-') }}{{ ','.join(['x', 'y']) }}", "a-1x,y"),
        ("{{ 'aba' | replace('a', 'c') }}{{ 'aba'.replace('a', 'd', 1) }}", "cbcdba"),
        ("{{ [1, 2] | sum }}{{ [{'n': 3}] | sum(attribute='n') }}", "33"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}", "1"),
        (
            "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(2) }}",
            "210",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}"
            "{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{{ tools }}{{ documents }}{{ bos_token }}", "NoneNone<s>"),
        ("{{ missing }}{{ ''.__class__ }}{{ '{0.__class__}'.format('') }}", ""),
        ("{{ '{}={:>3} {{}}'.format('a', 1) }}{{ '%s %02d' | format('b', 2) }}", "a=  1 {}b 02"),
        (
            "{{ '%s-%d' % ('c', 3) }}{{ ['x'] | join('-') }}{{ messages | join('', 'role') }}",
            "c-3xuser",
        ),
        ("{{ 'a</think>\nb'.split('</think>')[-1].lstrip('\n') }}", "b"),
    ],
)
def test_template_features_render_as_hugging_face_renders_them(source, expected):
    assert render(source, bos_token="<s>") == expected


def test_tools_and_context_reach_the_template():
    tool = {"type": "function", "function": {"name": "add"}}
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ mood }}"
    assert render(source, tools=[tool], mood="!") == "add!"


def test_strftime_now_gives_the_current_date():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_refusal_of_the_template_is_passed_on():
    with pytest.raises(TemplateError, match=r"refuses the messages(?s:.*)roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "messages",
    [[], [{}], [{"content": "x"}], [{"role": 3, "content": "x"}], [*USER, {"role": None}]],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(TemplateError, match="message"):
        render(CHATML, messages)


def test_missing_content_is_a_template_error():
    with pytest.raises(TemplateError, match="fails on these messages"):
        render(CHATML, [{"role": "user"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'a' ",
        "{% unknown %}",
        "{{ 1 | nofilter }}",
        "{{" + "(" * 9_000,
        "x" * 300_000,
    ],
)
def test_source_that_does_not_compile_is_refused(source):
    with pytest.raises(TemplateError, match="template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['time'] }}",
        "{{ (''|attr('__class__')).__base__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
        "{{ environment.tick.__func__ }}",
        "{{ messages.__reduce__() }}",
        "{{ (messages | map(attribute='__class__') | first).mro() }}",
    ],
)
def test_sandbox_cannot_be_left(source):
    with pytest.raises(TemplateError):
        render(source)


LOOP = "{% for i in range(99999) %}"
DOUBLE = "{% set s = 'abcdefgh' %}"
BOMBS = {
    "silent nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "loops that filter all": LOOP + LOOP.replace(" %}", " if no %}") + "{% endfor %}{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block b %}{{ self.b() }}{% endblock %}",
    "endless recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "long range": "{{ range(10 ** 12) | list }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set n = 9 %}" + "{% set n = n * n %}" * 60,
    "repeated text": "{{ 'a' * 10 ** 12 }}",
    "repeated list": "{{ [0] * 10 ** 12 }}",
    "doubling by plus": DOUBLE + "{% set s = s + s %}" * 60,
    "doubling by tilde": DOUBLE + "{% set s = s ~ s %}" * 60,
    "doubling by output": DOUBLE + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60 + "{{ s }}",
    "replace filter": DOUBLE + "{% set s = s | replace('a', s ~ s) * 9 %}" * 60,
    "replace method": "{% set s = 'aaaaaaaa' %}" + "{% set s = s.replace('a', s) %}" * 60,
    "join filter": DOUBLE + "{% set s = [s, s, s, s] | join %}" * 60,
    "join method": DOUBLE + "{% set s = s.join([s, s, s]) %}" * 60,
    "escaping json": "{% set s = '\"' %}" + "{% set s = s | tojson %}" * 60,
    "nested list": "{% set s = [1] %}" + "{% set s = [s, s] %}" * 60 + "{{ s }}",
    "nested list as json": "{% set s = [1] %}" + "{% set s = [s, s] %}" * 60 + "{{ s | tojson }}",
    "nested list as text": "{% set s = [1] %}"
    + "{% set s = [s, s] %}" * 60
    + "{{ s | string | length }}",
    "summed lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "indent": "{{ 'a' | indent(10 ** 12, true) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 12) }}",
    "padding": "{{ 'a'.center(10 ** 12) }}",
    "format filter": "{{ '%999999999999d' | format(1) }}",
    "percent": "{{ '%999999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 12, 1) }}",
    "format method": "{{ '{:>999999999999}'.format(1) }}",
    "format method of computed width": "{{ '{:>{}}'.format(1, 10 ** 12) }}",
    "date pattern": "{{ strftime_now('%9999999999Y') }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bomb_is_stopped(source):
    start = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(source, max_seconds=0.5).render(USER)
    assert time.monotonic() - start < 10


def test_output_is_capped():
    template = ChatTemplate("{{ messages[0].content }}" * 3, max_output_chars=25)
    assert template.render([{"role": "user", "content": "x" * 8}]) == "x" * 24
    with pytest.raises(TemplateError, match="too much work"):
        template.render([{"role": "user", "content": "x" * 9}])


def test_names_of_the_guards_cannot_be_shadowed():
    source = (
        "{% set tick = 1 %}{% set concatenate = 2 %}{% for i in [1] %}{{ 'a' ~ i }}{% endfor %}"
    )
    assert render(source) == "a1"


def test_template_can_be_used_again_after_it_ran_out_of_budget():
    template = ChatTemplate("{% for i in range(messages|length * 9999) %}{% endfor %}ok")
    template._max_seconds = 0.0
    with pytest.raises(TemplateError, match="time is up"):
        template.render(USER)
    template._max_seconds = 5.0
    assert template.render(USER) == "ok"
