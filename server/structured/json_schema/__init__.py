"""JSON schemas, rewritten so that llguidance can enforce them, or refused.

A keyword that llguidance lacks is rewritten only if the result allows exactly the same values:
`not` by De Morgan's laws, `if` and the `dependent...` as unions, a `oneOf` whose branches may
overlap by excluding the other branches from each, `uniqueItems` of a short enum as all its
arrangements. An unknown keyword or `format` is an annotation, as in JSON Schema.

It knows no grammar and no request: schemas in, schemas out.

Source of the semantics: JSON Schema 2020-12, core and validation.
"""

from penstock.server.structured.json_schema.facts import Unenforceable
from penstock.server.structured.json_schema.rewrite import enforceable

__all__ = ["Unenforceable", "enforceable"]
