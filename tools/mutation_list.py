# SPDX-License-Identifier: Apache-2.0
"""List the one-line defects that cosmic-ray can put into Python files, one JSON object per line.

Arguments: the files. It needs the Python of `make mutation-tools`, which has cosmic-ray. It leaves
out operators whose result is equivalent (`is` for `==`) or mostly crashes (`**` for `+`), and
changes of annotations, which nothing reads at run time.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import cosmic_ray.plugins  # type: ignore[import-not-found] # outside .venv
from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found] # the same
from cosmic_ray.ast.ast_query import ASTQuery  # type: ignore[import-not-found] # the same
from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found] # the same

COMPARISONS = (
    r"ReplaceComparisonOperator_(?!Is|.*Is)\w+|ReplaceComparisonOperator_Is(Not)?_Is(Not)?"
)
BINARY = "|".join(
    f"ReplaceBinaryOperator_{pair}"
    for pair in [
        "Add_Sub",
        "Sub_Add",
        "Mul_Add",
        "Mul_FloorDiv",
        "FloorDiv_Mul",
        "FloorDiv_Mod",
        "Mod_FloorDiv",
        "Mod_Mul",
        "BitOr_BitAnd",
        "BitAnd_BitOr",
        "BitXor_BitAnd",
        "LShift_RShift",
        "RShift_LShift",
    ]
)
OTHERS = r"ReplaceUnaryOperator_(Delete_\w+|USub_UAdd)|Replace\w+With\w+"
WHOLE = r"AddNot|ExceptionReplacer|NumberReplacer|ZeroIterationForLoop"
CHOSEN = re.compile(f"core/({COMPARISONS}|{BINARY}|{OTHERS}|{WHOLE})")


class WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations, which nothing reads at run time."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Remove the type of a parameter."""
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Remove the return type of a function."""
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Remove the type of a field."""
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def meaning(code: str) -> str:
    """Return the code of a module without annotations, as text; empty if it does not parse."""
    try:
        return ast.dump(WithoutAnnotations().visit(ast.parse(code)))
    except SyntaxError:
        return ""


def mutants(path: str) -> Iterator[dict[str, object]]:
    """Yield each mutant that changes one line and what the interpreter runs."""
    code = Path(path).read_text()
    lines, meant, tree = code.split("\n"), meaning(code), get_ast(code)
    for name in filter(CHOSEN.fullmatch, cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)()
        places = [
            ASTQuery(node).get_definition_name()
            for node in ast_nodes(tree)
            for _ in operator.mutation_positions(node)
        ]
        for occurrence, function in enumerate(places):
            changed = mutate_code(code, operator, occurrence).split("\n")
            numbers = [n for n, line in enumerate(lines) if line != changed[n]]
            if len(changed) == len(lines) and len(numbers) == 1:
                number = numbers[0]
                if meaning("\n".join(changed)) not in ("", meant):
                    yield {
                        "file": path,
                        "function": function or "",
                        "number": number,
                        "now": changed[number].strip(),
                    }


if __name__ == "__main__":
    for file in sys.argv[1:]:
        for mutant in mutants(file):
            print(json.dumps(mutant))
