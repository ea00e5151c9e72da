"""Chat templates: those that transformers renders alike, and those of strangers who mean harm."""

# With messages, tools, variables and special tokens of tests/test_chat.py.
ALIKE = [
    # Blank lines and indentation, a namespace, breaks, tools as JSON, special tokens.
    """\
{%- set found = namespace(system="none", count=0) %}
{{- bos_token }}
{% for message in messages %}
    {%- if message.role == "system" %}
        {%- set found.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- set found.count = found.count + 1 %}
    {% if found.count > 3 %}{% break %}{% endif %}
    [{{ message.role | upper }}] {{ message.content }}{{ eos_token if not loop.last }}
{% endfor %}
{{ found.system }} {{ tools | tojson }} {{ {"é": "<&>"} | tojson(indent=2) }}
""",
    "{% for each in messages %}{% if each.role == 'assistant' %}{% generation %}"
    "{{ each.content }}{% endgeneration %}{% else %}{{ each.content }}{% endif %}{% endfor %}",
    "{{ strftime_now('%Y') }} {% if thinking is defined %}{{ thinking }}{% endif %}",
    "{{ tools | tojson(true) }}{{ tools | tojson(false, 3) }}{{ [] | tojson(indent=1) }}",
    "{{ tools | tojson(true, '-', (';', '=')) }}",
    "{{ {'b': 1, 'a': none} | tojson(false, none, (',', ':'), true) }}",
    "{% for each in messages %}{{ each.reasoning_content }}{{ each.thinking }}{% endfor %}",
    "{{ messages[-1].size }}{{ messages | pprint }}{{ messages | map(attribute='role') | join }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}{{ dict.update is defined }}{{ names[1] }}",
    "{% macro m(a, b=2) %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}]"
    "{% endmacro %}{{ m(1) }}{{ m(1, 3, 4, c=5) }}{% call m(0) %}x{{ bos_token }}{% endcall %}",
    "{% set x %} a {{ 1 }}{% endset %}{% filter upper %}{{ x }}é{% endfilter %}",
    "{{ 'a\nb\n' | indent(2, true) }}{{ 'a\nb' | indent('> ') }}{{ 'a b c' | wordwrap(3) }}",
    "{% autoescape true %}{{ '<' }}{{ bos_token ~ '<' | safe }}{% endautoescape %}",
    "{{ ('<{}>' | e).format('&') }}{{ ('%s' | e) % '&' }}{{ ('&' | safe).join(['<']) }}",
    "{{ '%5.2f|%-4s' | format(1.5, 'a') }}{{ '%(x)s' | format(x=1) }}{{ '%d%%' % 5 }}",
    "{{ '{:>5}|{!r}'.format('a', 1) }}{{ '{a[b]}{c}'.format_map({'a': {'b': 1}, 'c': 2}) }}",
    "{{ 'a\tb'.expandtabs(4) }}{{ 'a' * 3 ~ 2 ** 9 }}{{ 2 * [1] }}{{ 'abc'.translate({97: 'x'}) }}",
    "{{ 'x' | center(9) }}{{ 'x'.ljust(3, '.') }}{{ 'x'.zfill(3) }}{{ 'xax' | trim('x') }}",
    "{{ ', '.join(['a', 'b']) }}{{ 'a-b'.rsplit('-', 1) }}{{ 'aXa'.replace('a', 'b', 1) }}",
    "{{ [3, 1] | sort }}{{ 'a b  c'.split() }}{{ [1, 2, 3] | batch(2, 0) | list }}",
    "{{ 7.125 | round(2) }}{{ [1, 2, 3] | slice(2) | list }}{{ [1] | join('-', 'real') }}",
    "{% for a in [1, [2, 3]] recursive %}{{ loop(a) if a is iterable else a }}{{ loop.length }}"
    "{% endfor %}",
    "{% for a in messages | selectattr('role', 'equalto', 'user') %}{{ loop.last }}{% endfor %}",
    "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}",
    "{% block a %}{{ self.b() }}{% endblock %}{% block b %}{{ eos_token }}{% endblock %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ lipsum is defined }}",
    "{{ () }}{{ (1,) }}{{ none }}{{ 1.0 }}{{ nothing }}{{ [1, 2] | map('string') | join('-') }}",
]


def loops(body, before=""):
    loop = "{% for i in range(99999) %}"
    return f"{before}{loop}{loop}{body}{'{% endfor %}' * 2}"


def grown(change, start="'ab'", times=60):
    """A template that changes `ns.x` again and again."""
    change = f"{{% set ns.x = {change} %}}" if "{%" not in change else change
    return f"{{% set ns = namespace(x={start}) %}}" + (
        f"{{% for i in range({times}) %}}{change}{{% endfor %}}{{{{ ns.x }}}}"
    )


def path(filter):
    return f"{{{{ range(99999)|{filter} }}}}".replace("PATH", ".".join(["real"] * 9000))


LONG = "{% set b = 'y' * 99999 %}{% set l = [0] * 9999 %}"
TOO_LONG = [
    loops(""),
    loops("{% set x = i %}"),
    loops("{% if l == l %}{% endif %}", LONG),
    loops("{% if b in b %}{% endif %}", LONG),
    loops("{% set x = {}[i] %}"),
    loops("{% set x = 5 is in l %}", LONG),
    loops("{% with a = i %}{% endwith %}"),
    loops("{% block a scoped %}{% endblock %}"),
    loops("{% set t = loop.cycle(1, 2) %}"),
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for i in range(99999) %}{{ l|unique|first }}{% endfor %}" + LONG,
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(50) recursive %}{% if loop.depth < 40 %}{{ loop(range(50)) }}"
    "{% endif %}{% endfor %}",
    LONG + "{{ range(99999)|select('in', l)|reject('in', l)|list }}",
    path("sort(attribute='PATH')"),
    path("map(attribute='PATH')|list"),
    path("groupby('PATH')"),
    path("sum(attribute='PATH')"),
    path("min(attribute='PATH')"),
    path("unique(attribute='PATH')|list"),
    path("rejectattr('PATH')|list"),
]
TOO_MUCH = [
    loops("x"),
    loops("{{ i }}"),
    loops("x" * 9000),
    "{{ 'x' * 50000 }}",
    "{% autoescape true %}{{ '&' * 99999 }}{% endautoescape %}",
    "{{ messages * 900 }}",
    loops("{% generation %}x{% endgeneration %}"),
    "{% block a %}" + loops("x") + "{% endblock %}",
    LONG + "{% for i in range(99999) %}{% filter default(b, true) %}{% endfilter %}{% endfor %}",
    LONG + "{% for i in range(99999) %}{% call b.format() %}{% endcall %}{% endfor %}",
    LONG + "{% set j = joiner(b) %}{% for i in range(99999) %}{{ j() }}{% endfor %}",
    "{% for i in range(99) %}{{ lipsum() }}{% endfor %}",
]
TOO_LARGE = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{{ (['x' * 50000] * 10000)|join }}",
    "{{ ((([1] * 1000,) * 1000,) * 1000,) * 1000 }}",
    "{{ range(99999)|list }}",
    "{{ range(99999)|join('y' * 9999) }}",
    "{{ ('a' * 99999)|list }}",
    "{{ ('a' * 99999).split('a') }}",
    "{{ ('€' * 99999)|urlencode }}",
    "{{ ('&' * 99999)|forceescape }}",
    "{{ {'a': '&' * 99999}|xmlattr }}",
    "{{ ('\ufb03' * 99999)|upper }}",
    "{{ ('😀' * 20000)|tojson(true) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1.0 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%-+ 0#*d' % (1000000000, 1) }}",
    "{{ '%.*f' % (1000000000, 1.0) }}",
    "{{ '%(x)1000000000s' % {'x': 1} }}",
    "{{ ('%(x)s' * 9999) % {'x': 'y' * 9999} }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ ['%1000000000d']|map('format', 1)|list }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:\uff11\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff10}'.format(1) }}",
    "{{ '{:.1000000000f}'.format(1.0) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{w:{w}}'.format_map({'w': '1000000000'}) }}",
    "{{ ('{:1000000000}'|attr('format'))(1) }}",
    "{{ '{:1000000000}'['format'](1) }}",
    "{{ ('{:1000000000}'|safe).format(1) }}",
    "{{ lipsum(n=100000000) }}",
    "{{ lipsum(1, false, 1, 1000000000) }}",
    "{{ strftime_now('%Y' * 49999) }}",
    "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(*range(99999)) }}",
    "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "".join(
        f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}"
        for i in range(1, 60)
    )
    + "{% macro m0() %}xxxxxxxx{% endmacro %}{{ m59() }}",
    grown("ns.x + ns.x"),
    grown("ns.x ~ ns.x"),
    grown("'%s%s' % (ns.x, ns.x)"),
    grown("'%s%s'|format(ns.x, ns.x)"),
    grown("'{0}{0}'.format(ns.x)"),
    grown("'{a}{a}'.format_map({'a': ns.x})"),
    grown("ns.x|tojson", "'\"'"),
    grown("ns.x|pprint", "'\"\\''"),
    grown("[ns.x, ns.x]"),
    grown("(ns.x, ns.x)"),
    grown("{'a': ns.x, 'b': ns.x}"),
    grown("dict(a=ns.x, b=ns.x)"),
    grown("dict.fromkeys('ab', ns.x)"),
    grown("{}.fromkeys('ab', ns.x)"),
    grown("{'a': [ns.x].copy(), 'b': ns.x}"),
    grown("cycler(ns.x, ns.x).items"),
    grown("([ns.x] * 4)[1:3]"),
    grown("[ns.x, ns.x]|map('list')|list", "[1]"),
    grown("[{'k': 1, 'v': ns.x}, {'k': 1, 'v': ns.x}]|groupby('k')"),
    grown("[[ns.x, ns.x]]|sum(start=[ns.x])"),
    "{% macro m(n) %}{% if n %}{{ m(n-1, varargs, varargs) }}{% endif %}{% endmacro %}"
    "{{ m(60, 1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1, a=kwargs, b=kwargs) }}{% endif %}{% endmacro %}"
    "{{ m(60, a=1) }}",
]
TOO_LARGE_ON_THE_WAY = [
    f"{{% set x %}}{loops('x' * 99)}{{% endset %}}",
    f"{{% macro m() %}}{loops('x' * 99)}{{% endmacro %}}{{{{ m() }}}}",
    f"{{% filter upper %}}{loops('x' * 99)}{{% endfilter %}}",
    "{% macro m() %}{{ caller() }}{% endmacro %}"
    f"{{% call m() %}}{loops('x' * 99)}{{% endcall %}}",
    LONG + "{% set x %}{% for i in range(999) %}{% filter default(b, true) %}{% endfilter %}"
    "{% endfor %}{% endset %}",
    LONG + "{% set x %}{% for i in range(999) %}{% call b.format() %}{% endcall %}{% endfor %}"
    "{% endset %}",
    LONG + "".join(f"{{% set a{i} = b ~ {i} %}}" for i in range(200)),
    LONG + "".join(f"{{% set a{i} = b[{i}:] %}}" for i in range(200)),
    LONG + "".join(f"{{% set a{i} = l[{i}:] %}}" for i in range(200)),
    loops("{% set x = 'y'.center(999) %}"),
    "{{ range(99999)|map('replace', '', 'y' * 999)|list }}",
    "{{ ('{0}' * 33333).format('y' * 99999) }}",
    "{% set ns = namespace(b='y' * 99999) %}{{ ('{0.b}' * 9999).format(ns) }}",
]
MAY_BE_TOO_LARGE = [
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ 'x'.rjust(10000000000) }}",
    "{{ 'x'.zfill(10000000000) }}",
    "{{ ('\t' * 9999).expandtabs(99999) }}",
    "{{ ('x\n' * 9999)|indent(99999) }}",
    "{{ ('x\n' * 9999)|indent(width='y' * 99999) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{{ 1.5|round(method='floor', precision=-100000000) }}",
    "{{ ('x ' * 9999)|wordwrap(1, true, 'y' * 99999) }}",
    "{{ ('http://a.b ' * 9000)|urlize(rel='y' * 99999) }}",
    "{{ ('a' * 99999)|join('y' * 99999) }}",
    "{{ range(999)|map('string')|join('y' * 99999) }}",
    "{{ ('y' * 99999).join(range(999)|map('string')) }}",
    "{{ ('a' * 9999).translate({97: 'b' * 99999}) }}",
    "{{ ('a' * 99999)|replace(new='y' * 99999, old='a') }}",
    "{{ ('5' * 99999)|replace(5, 'y' * 99999) }}",
    "{{ ('一' * 99999).strip('丁' * 50000 ~ '一') }}",
    "{{ ('一' * 99999)|trim('丁' * 50000 ~ '一') }}",
    "{{ ('a' * 99999).rfind('ab' ~ 'a' * 49999) }}",
    "{{ ('a' * 99999).rsplit('ab' ~ 'a' * 49999) }}",
    "{{ [[1]]|tojson(indent=1000000000) }}",
    "{{ ([1] * 9999)|tojson(separators=('x' * 99999, ':')) }}",
    "{% autoescape 'x'|center(1000000000) %}{% endautoescape %}",
    grown("ns.x.replace('a', ns.x)"),
    grown("ns.x.join([ns.x, ns.x])"),
]
NUMBERS = [
    "{{ 9**(9**9) }}",
    "{{ (9**999) ** 9999 }}",
    grown("ns.x * ns.x", "9"),
    grown("ns.x ** 2", "9"),
    grown("ns.x * 2", "2", 99999),
    "{{ ('f' * 99999)|int(base=16) }}",
]
REFUSED = {
    "runs for more than": TOO_LONG,
    "it writes more than": TOO_MUCH,
    "it makes a text or a list of more than": TOO_LARGE,
    "on its way": TOO_LARGE_ON_THE_WAY,
    "it may make more than": MAY_BE_TOO_LARGE,
    "it makes a number of more than": NUMBERS,
}


HARMLESS = {
    "{{ '%s' % 'a' }}{{ 'a' * -5 }}{{ 7 ** 2 }}{{ 2 ** -1 }}{{ 0 * 'a' }}": "a490.5",
    "{{ range(9)|map('string')|join }}{{ [1, 2]|batch(1)|list }}": "012345678[[1], [2]]",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}": "[<Namespace>]",
    "{{ raise_exception.__globals__ }}{{ lipsum.__self__ }}{{ ''|attr('__class__') }}": "",
    "{{ '{0.__class__}'.format(1) }}{{ (range(3)|map('string')).gi_frame }}": "",
    "{{ {1: 2}.keys() - {1: 2}.keys() }}{{ 'a'.strip() }}{{ strftime_now('%%') }}": "set()a%",
    "{% for i in range(9) %}{{ loop|list|length }}{% endfor %}": "8",
    "{{ namespace(**{'self': 1}) }}{{ self }}": "<Namespace><TemplateReference None>",
    "{{ messages[0].nothing }}{{ nothing }}{{ messages[9] }}": "",
}
MISTAKES = {
    "{{ raise_exception('No system role') }}": "these messages: No system role",
    "{{ raise_exception('a\u2028b') }}": "these messages: a",
    "{{ raise_exception('\x1b[2J\ud800') }}": r"\x1b[2J\ud800",
    "{{ raise_exception('') }}": "TemplateError",
    "{{ raise_exception('x' * 99999) }}": "xxx...",
    "{{ raise_exception([1]) }}": "[1]",
    "{{ raise_exception() }}": "TypeError: ",
    "{% for %}": "Expected an expression",
    "{{ 'a": "unexpected char",
    "{% if a %}": "Unexpected end of template",
    "{% do 1 %}": "unknown tag",
    "{{ 1|nothing }}": "No filter named",
    "{{ 1 is nothing }}": "No test named",
    "{{ [1]|map('nothing')|list }}": "No filter named",
    "{{ nothing.at.all }}": "is undefined",
    "{{ nothing() }}": "is undefined",
    "{{ messages[0].content.x.y }}": "has no attribute",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ dict.update(messages[0], {'a': 1}) }}": "has no attribute 'update'",
    "{{ 'a'.encode('idna') }}{{ 'a'.encode() }}": "unsafe",
    "{{ (5).to_bytes(1000000000, 'big') }}": "unsafe",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "has no attribute '_x'",
    "{{ namespace(__init__=1) }}": "has no attribute '__init__'",
    "{% set messages.x = 1 %}": "non-namespace object",
    "{{ range(10**9) }}": "Range too big",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 1 % 0 }}": "ZeroDivisionError",
    "{{ 9.0 ** 9999 }}": "OverflowError",
    "{{ (1e308 * 10)|int }}": "OverflowError",
    "{{ 1e999 }}": "NameError",
    "{{ " + "9" * 5000 + " }}": "Exceeds the limit",
    "{{ ('%' + '9' * 5000 + 'd') % 1 }}": "Exceeds the limit",
    "{{ '{x}'.format(y=1) }}": "KeyError: 'x'",
    "{{ '{}'.format() }}": "IndexError",
    "{{ '{a}'.format_map() }}": "ValueError",
    "{{ {}[messages] }}{{ {[1]: 2} }}": "unhashable",
    "{{ 1 + 'a' }}": "TypeError: unsupported operand",
    "{{ [1, 'a']|sort }}": "TypeError",
    "{{ 5|first }}": "TypeError",
    "{{ 5[1:] }}": "TypeError: 'int' object is not",  # without the warning of Python's compiler
    "{{ 'a'.center() }}": "TypeError",
    "{{ ', '.join() }}": "TypeError",
    "{{ lipsum('y' * 99999, true, 1, 99999) }}": "ValueError: invalid literal",
    "{{ 'abc'[::0] }}": "slice step",
    "{% for a, b in [1] %}{% endfor %}": "cannot unpack",
    "{% break %}": "outside loop",
    "{% include 'a' %}": "no loader",
    "{% extends 'a' %}": "no loader",
    "{% import 'a' as b %}": "no loader",
    "{% include 'a' ignore missing %}": "no loader",
    "{{ nothing|tojson }}": "not JSON serializable",
    "{{ {(1, 2): 3}|tojson }}": "keys must be",
    "{{ {1: 2, 'a': 3}|tojson(sort_keys=true) }}": "TypeError",
    "{{ 1|tojson(separators=5) }}": "TypeError",
    "{{ 1|tojson(default=5) }}": "TypeError",
    "{{ strftime_now(5) }}": "TypeError",
    "{{ strftime_now('\ud800') }}": "UnicodeEncodeError",
    "{{ '\ud800' }}": "UnicodeEncodeError",
    "a\ud800b": "UnicodeEncodeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{% block a %}{{ self.a() }}{% endblock %}": "RecursionError",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{{ a" + ".b" * 5000 + " }}": "RecursionError",
    "{% if a %}" * 5000: "RecursionError",
    "{% for a in b %}" * 50 + "{% endfor %}" * 50: "too many statically nested blocks",
    grown("[ns.x]", "[]", 200): "lists in lists, more than 100 deep",
    "{{ 'a'" + "|list" * 99 + " }}" + "x" * 100_000: "it has more than 100000 characters",
}
