"""Train a draft head: accelerate launch train.py RECIPE [key=value ...]"""

import os
import sys

from decode.errors import UserError


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 0 if arguments else 2
    try:
        from headtrain.recipe import load_recipe
        from headtrain.trainer import train

        folder = train(load_recipe(arguments[0], arguments[1:]))
        if os.environ.get("RANK", "0") == "0":
            print(folder)
    except UserError as error:
        print(f"headtrain: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
