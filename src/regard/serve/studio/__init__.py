"""The studio: the server with a page that trains, generates and looks inside, in one folder."""
