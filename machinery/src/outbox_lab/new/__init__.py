"""The command `outbox new` writes files of a domain, from templates, for a project to edit.

`properties` reads ``name:type``, `schemas` makes events and their versions, `sinks` makes jobs with their SQL. `change`
makes files from templates, writes all of them or none, and knows the project's migrations.
"""
