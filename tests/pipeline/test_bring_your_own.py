from tests.fix_secured import Secured, plain_login
def test_up(secured: Secured) -> None:
    print(secured.settings)
