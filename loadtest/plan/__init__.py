"""`penstock plan`: how many devices a load takes under targets, with which flags, at what cost.

`candidates` are compared, `probe` simulates one of them at one rate, `search` finds the highest
rate that meets the targets, `choice` picks the cheapest, and `refutation` says what a measurement
must then find. `document` is the plan as JSON and as text, `page` as HTML.
"""
