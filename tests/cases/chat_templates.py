"""Chat templates that transformers renders alike, and those that fail."""

# With messages, tools, variables and special tokens of tests/test_chat.py: what the environment
# adds to that of jinja2, or keeps from templates.
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
    "{% set n = namespace(**{'self': 1}) %}{{ n.self }}{{ n.other }}{{ self }}{{ 'é'.encode() }}",
    "{{ raise_exception.__globals__ }}{{ lipsum.__self__ }}{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}{{ (range(3)|map('string')).gi_frame }}",
]

MISTAKES = {
    "{{ raise_exception('No system role') }}": "these messages: No system role",
    "{{ raise_exception('a\u2028b') }}": "these messages: a",
    "{{ raise_exception('\x1b[2J\ud800') }}": r"\x1b[2J\ud800",
    "{{ raise_exception('x' * 99999) }}": "xxx...",
    "{{ raise_exception() }}": "TypeError: ",
    "{% for %}": "Expected an expression",
    "{% do 1 %}": "unknown tag",
    "{{ 1|nothing }}": "No filter named",
    "{{ nothing.at.all }}": "is undefined",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ dict.update(messages[0], {'a': 1}) }}": "has no attribute 'update'",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "has no attribute '_x'",
    "{{ namespace(__init__=1) }}": "has no attribute '__init__'",
    "{{ range(10**9) }}": "Range too big",
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{% include 'a' %}": "no loader",
    "{{ nothing|tojson }}": "not JSON serializable",
    "{{ 1|tojson(default=5) }}": "TypeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
}
