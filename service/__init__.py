"""Time, sockets and people: settings, scheduler, engine, HTTP front end, metrics, logs. Imports model, cuda and mm."""
