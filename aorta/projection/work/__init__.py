"""Work of one rank: operations with their sizes, layers made of them, streams that run them."""
