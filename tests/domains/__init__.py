"""Declare domains: every public call, every parameter, and the named parts of its values.

`declared` says what a domain is and how rows of parts are drawn. One module for each family of
calls lists their parts as data, beside the function that calls them and judges the result. `public`
finds what is public; a test fails for a public parameter without a domain.
"""
