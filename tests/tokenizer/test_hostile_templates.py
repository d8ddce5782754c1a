"""Templates that try to leave the sandbox, or to take all of the time or the memory."""

import resource
import subprocess
import sys
import threading
import time

import pytest

from inferjax.errors import TemplateError
from inferjax.tokenizer import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
SET = "{% set ns = namespace(v=[], n=0) %}"
OFTEN = "{% for i in range(99999) %}"
LONG = "{% set s = 'x' * 15000000 %}"


def render(source: str, seconds: float = 2.0) -> str:
    return ChatTemplate(source, max_seconds=seconds).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__mro__[1].__subclasses__() }}",
        "{{ range.__class__.__base__.__subclasses__() }}",
        "{{ loop.__init__.__globals__ }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterator.__class__.mro() }}{% endfor %}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ (messages | attr('__' ~ 'class' ~ '__')).__mro__ }}",
        "{{ messages | map(attribute='__class__.__mro__') | list | first | first }}",
        "{{ (messages | map(attribute='role.__class__') | list)[0].mro() }}",
        "{{ (messages | map('attr', '__class__') | list)[0].mro() }}",
        "{{ (messages | groupby('__class__.__name__'))[0].grouper.mro() }}",
        "{{ ([messages] | sum(attribute='__class__')) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
        "{{ '{a.__class__.__base__}'.format_map({'a': 1}) }}",
        "{{ ('{0.__cl' ~ 'ass__.__base__}').format(1) }}",
        "{{ ('{0.__class__.__base__}' | safe).format(1) }}",
        "{{ '%(x)s'.__mod__({'x': 1}) }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
        "{% macro f() %}{{ caller.__init__.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
        "{{ strftime_now.__self__.filters }}",
        "{{ strftime_now.__func__.__globals__ }}",
        "{{ __builtins__.open('/etc/passwd') }}",
        "{{ __import__('os').system('id') }}",
        "{{ config.items() }}",
        "{{ get_flashed_messages.__globals__ }}",
        "{% extends '/etc/passwd' %}",
        "{% include messages %}",
        "{% from 'os' import system %}",
        "{{ lipsum.__globals__ }}",
        "{{ 'a'.encode() }}",
        "{{ {}.fromkeys('ab') }}",
        "{{ (5).to_bytes(3, 'big') }}",
        "{{ (1.5).fromhex('1') }}",
        "{{ ''.maketrans('a', 'b') }}",
        "{{ [1, 2].sort() }}",
        "{{ [1, 2].clear() }}",
        "{{ {'a': 1}.setdefault('b', 2) }}",
        "{{ messages | pprint }}",
        "{{ 'x' | urlize }}",
        "{{ 'x' | xmlattr }}",
    ],
)
def test_escape_is_refused(source):
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}{{ x.__init__ }}{{ messages[0]['__class__'] }}",
        "{{ messages | map(attribute='__class__') | join }}",
        "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ raise_exception.__globals__ }}",
        "{{ ''['__cl' 'ass__'] }}{{ namespace(a=1).__dict__ }}",
    ],
)
def test_what_is_hidden_renders_as_nothing(source):
    assert render(source) == ""


# Every one of these took minutes, or gigabytes, or both.
BOMBS = {
    "lists nested by doubling, compared": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a == b }}",
    "the same, by a test": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a is eq(b) }}",
    "the same, found in a list": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ [b].index(a) }}",
    "the same, seen by a loop": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{% for c in [a, b] %}{{ loop.changed(c) }}{% endfor %}",
    "the same, sorted": "{% set a = [1] %}{% set b = [1] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ [a, b] | sort | length }}",
    "power by rounding": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "long texts sorted": LONG + "{{ ([s] * 100000) | sort | length }}",
    "long texts in lower case": LONG + OFTEN + "{{ s.lower() | length }}{% endfor %}",
    "long texts kept": SET + LONG + OFTEN + "{% set ns.v = ns.v + [s.upper()] %}{% endfor %}",
    "slices kept": SET + LONG + OFTEN + "{% set ns.v = ns.v + [s[1:]] %}{% endfor %}",
    "texts of the template kept": "{% set x %}"
    + OFTEN
    + "y" * 200_000
    + "{% endfor %}{% endset %}",
    "texts of a call block": "{% macro f() %}"
    + OFTEN
    + "{{ caller() }}{% endfor %}{% endmacro %}{% set x %}{% call f() %}"
    + "y" * 200_000
    + "{% endcall %}{% endset %}",
    "literals kept": SET + OFTEN + "{% set ns.v = ns.v + [[" + "[1]," * 5_000 + "]] %}{% endfor %}",
    "comments to strip": "{{ ('<!---->' * 2000000) | striptags }}",
    "deep JSON, indented": "{% set ns = namespace(v=[1] * 400000) %}{% for i in range(400) %}"
    "{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v | tojson(indent=16) | length }}",
    "JSON with long separators": "{{ ([1] * 9999) | tojson(separators=('x' * 9999, ':')) }}",
    "fields of one value": LONG + "{{ ('%(a)s' * 99999) % {'a': s} }}",
    "fields of one argument": LONG + "{{ ('{0}' * 99999).format(s) }}",
    "digits of all scripts as a list": "{{ ('中' * 15000000) | list | length }}",
    "pieces": "{{ ('xyb' * 5000000).split('b') | length }}",
    "words": "{{ ('xy ' * 5000000).split() | length }}",
    "lines": "{{ ('xy\n' * 5000000).splitlines() | length }}",
    "long division": "{% set a = ('f' * 9000000) | int(0, 16) %}{{ a * a // (a + 1) }}",
    "long remainder": "{% set a = ('f' * 9000000) | int(0, 16) %}{{ a % (a // 3) }}",
    "tuples nested deep, as a key": "{% set ns = namespace(v=()) %}"
    + OFTEN
    + "{% set ns.v = (ns.v,) %}{% endfor %}{{ {ns.v: 1} }}",
    "tuples nested deep, looked up": "{% set ns = namespace(v=()) %}"
    + OFTEN
    + "{% set ns.v = (ns.v,) %}{% endfor %}{{ {}[ns.v] }}{{ {}.get(ns.v) }}",
    "arguments nested deep": SET
    + "{% macro f() %}{% set ns.v = varargs %}{% endmacro %}"
    + OFTEN
    + "{{ f(ns.v) }}{% endfor %}{{ {ns.v: 1} }}",
    "many parts": "{{a}}" * 50_000,
    "many branches": "{% if a %}" + "{% elif b %}" * 20_000 + "{% endif %}",
}


@pytest.fixture(scope="module")
def peak_is_bounded():
    """Refuse memory beyond what the budget of one template allows, for all of them together."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 700 * 2**20


@pytest.mark.usefixtures("peak_is_bounded")
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bomb_is_stopped(source):
    start = time.process_time()
    with pytest.raises(TemplateError):
        render(source, seconds=0.5)
    assert time.process_time() - start < 5


DEEP = (
    "{% set ns = namespace(v=[]) %}" + OFTEN + "{% set ns.v = ns.v | map('upper') %}{% endfor %}ok",
    BOMBS["tuples nested deep, as a key"],
)


def test_small_stack_is_not_used_up():
    """Run in a process, since what is wrong here would end it."""
    code = (
        "import threading, sys\n"
        "from inferjax.tokenizer import ChatTemplate\n"
        "from inferjax.errors import TemplateError\n"
        "def run(source):\n"
        "    try:\n"
        "        ChatTemplate(source).render([{'role': 'user', 'content': ''}])\n"
        "    except TemplateError:\n"
        "        pass\n"
        "    print('done')\n"
        "threading.stack_size(256 * 1024)\n"
        f"for source in {DEEP!r}:\n"
        "    thread = threading.Thread(target=run, args=(source,))\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr[-500:]


def test_long_conversation_stays_within_the_budget():
    source = (
        "{% set ns = namespace(first=true) %}{% for m in messages %}"
        "{% if m.role == 'user' and loop.index0 < messages | length %}"
        "{{ '<|user|>' ~ m['content'] | trim }}{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}{% else %}"
        "{{ '<|bot|>' + m.content[:100] }}{{ m | tojson(indent=2) }}{% endif %}"
        "{% set ns.first = false %}{% endfor %}{{ messages[1:] | length }}"
    )
    messages = [{"role": ("user", "bot")[i % 2], "content": "text " * 400} for i in range(2000)]
    assert ChatTemplate(source, max_seconds=30).render(messages).endswith("1999")


def test_budget_is_each_renderings_own_in_threads():
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(template.render(USER * 500))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["HI" * 500] * 4
