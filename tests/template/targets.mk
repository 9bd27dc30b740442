# Part of the Makefile in the template's own repository.

.PHONY: test-template test-machinery test-sample bake

# They start no stack, so those of one file need not stay together.
test-template: archives
	@$(PYTEST) tests/template -n 2 $(ARGS)

test:: test-template

check:: install
	@$(PYTEST) -q tests/template -m 'not copies'

# The machinery's tests in a copy without the sample: what a project has that has deleted it.
test-machinery: export JDK_JAVA_OPTIONS ?= -XX:TieredStopAtLevel=1
test-machinery: archives
	@$(BIN)/python -m tests.template.scratch machinery $(PARALLEL) $(ARGS)

test-sample: export JDK_JAVA_OPTIONS ?= -XX:TieredStopAtLevel=1
test-sample: archives
	@$(PYTEST) tests/sample $(PARALLEL) $(ARGS)
