"""Other libraries' attention over several ranks, put through the laws of our own schemes: `nox -s conformance`.

A library is called as its documentation says, on problems of our strategies, and judged by our reference and tolerance. Every
"wrong" comes with a script that shows it with that library alone; the session runs the script too.
"""
