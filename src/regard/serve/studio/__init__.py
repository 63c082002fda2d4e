"""The studio: the server with a page that trains, runs and inspects the models of one folder."""
