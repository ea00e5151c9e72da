"""Chat templates and conversations at random."""

TEXTS = ("", "a", " b ", "a,b", "Hello,\nwhat is 1 < 2?", "é🎉日", "<|im_end|>", "{{ x }}", "'\"\\")
TEXTS += ("\t\r\n", "a\u2028b", "&lt;", "१", "x" * 99, "http://a.b c", "<b>c</b>", "True", "12")


def words(text):
    return text.split()


LEAVES = words("""
    messages messages[0].content messages[-1] tools x names bos_token s nothing 1 -2 2.5 'ab' 'é,'
    true none [1,'b'] {'a':1} ()
""")
FILTERS = words("""
    upper lower title capitalize trim length string list first last tojson tojson(indent=2) e safe
    default('d') default('d',true) reverse|list sort unique|list join('-') replace('a','é')
    indent(2) wordcount striptags int float abs round batch(2)|list dictsort items|list select|list
    map('string')|list map(attribute='role')|list sum selectattr('role','equalto','user')|list
    rejectattr('content')|list truncate(9) pprint center(9) forceescape urlencode min max
    attr('content') d slice(2)|list groupby('role')|list format('a') xmlattr filesizeformat
""")
TESTS = words("""
    defined none string mapping iterable sequence number odd true integer float boolean callable
    in('abc') eq(1) sameas(none) upper
""")
METHODS = words("""
    strip() split() split(',') startswith('a') upper() items()|list role get('role') lstrip('\\n')
    rstrip() splitlines() find('a') count('a') format(1) get('content','none') title() content
    replace('a','b') keys()|list zfill(5) isdigit() rsplit(none,1) partition(',') join(['x','y'])
    append(1)
""")
ITEMS = words("0 -1 1: ::-1 'content' :2 'a' 9 -3:-1")
BINARY = (*words("+ ~ * % == < in and or // - != >= /"), "not in")


def expression(rng, depth=3):
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(LEAVES)
    inner, other = expression(rng, depth - 1), expression(rng, rng.randrange(depth))
    return rng.choice(
        (
            f"{inner}|{rng.choice(FILTERS)}",
            f"({inner})|{rng.choice(FILTERS)}",
            f"({inner} {rng.choice(BINARY)} {other})",
            f"({inner} is {rng.choice(('', 'not '))}{rng.choice(TESTS)})",
            f"({inner}).{rng.choice(METHODS)}",
            f"({inner})[{rng.choice(ITEMS)}]",
            f"({inner} if {other} else 'e')",
            f"[{inner}, {other}]",
            f"{{'a': {inner}, 'b': {other}}}",
            f"(not {inner})",
            f"m({inner})",
        )
    )


MACRO = "{% macro m(a, b=2) %}[{{ a }}{{ varargs }}{{ caller() if caller }}]{% endmacro %}"


def block(rng, depth=2):
    """Some statements."""

    def inner():
        return block(rng, depth - 1) if depth else rng.choice(TEXTS)

    def value():
        return expression(rng, rng.randrange(3))

    begin, end = rng.choice(("{%", "{%-")), rng.choice(("%}", "-%}"))
    kinds = (
        lambda: f"{{{{- {value()} }}}}",
        lambda: f"{{{{ {value()} }}}}" + rng.choice(("\n", "  ", " |\n    ")),
        lambda: f"{begin} if {value()} {end}{inner()}{{% else %}}{inner()}{{% endif %}}\n",
        lambda: f"{begin} for s in messages {end}{inner()}{{{{ loop.index }}}}{{% endfor %}}",
        lambda: f"{begin} for s in {value()} if s {end}{inner()}{{% else %}}-{{% endfor %}}",
        lambda: f"{begin} set x = {value()} {end}",
        lambda: f"{begin} set x %}}{inner()}{{% endset %}}",
        lambda: f"{{% set n = namespace(a={value()}) %}}{{% set n.a = {value()} %}}{{{{ n.a }}}}",
        lambda: f"{{% filter {rng.choice(FILTERS).partition('|')[0]} %}}{inner()}{{% endfilter %}}",
        lambda: f"{{% call m({value()}) %}}{inner()}{{% endcall %}}",
        lambda: f"{{% generation %}}{inner()}{{% endgeneration %}}",
        lambda: f"  {{%- if 1 %}}{inner()}{{%- endif %}}{{# c #}}\n",
        lambda: rng.choice(("{% raw %}{{ x }}{% endraw %}", "{{ nothing }}", "{{- loop.last }}")),
    )
    return "".join(rng.choice(kinds)() for _ in range(rng.randint(1, 3)))


def template(rng):
    return f"{MACRO}{block(rng)}"


def json_value(rng, depth=2):
    if depth == 0 or rng.random() < 0.6:
        return rng.choice((None, True, False, 0, 7, -1, 2.5, 1e20, *TEXTS))
    if rng.random() < 0.5:
        return [json_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice(("a", "b", "é")): json_value(rng, depth - 1) for _ in range(rng.randrange(3))
    }


def conversation(rng):
    """Messages with texts, parts, calls of tools and more."""
    found = []
    for _ in range(rng.randint(1, 4)):
        content = rng.choice(TEXTS)
        parts = [{"type": "text", "text": rng.choice(TEXTS)}]
        message = {
            "role": rng.choice(("system", "user", "assistant", "tool")),
            "content": content if rng.random() < 0.7 else parts,
        }
        if rng.random() < 0.3:
            call = {"name": "f", "arguments": {"a": json_value(rng)}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        if rng.random() < 0.2:
            message["size"] = json_value(rng)
        found.append({name: value for name, value in message.items() if value is not None})
    return found
