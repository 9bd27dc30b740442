"""The wing that develops and proves: the embedded stack, the walkthrough, the soak, and the fixtures of tests.

It is built on `outbox`, which does without it: no image of a service or a sink has it. Public are `outbox_lab.testing`
and `outbox_lab.testing.contract` for tests, `outbox_lab.walkthrough` for `outbox demo`, and `outbox_lab.soak`.
"""
