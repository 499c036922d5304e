"""Reports for people: text now, one offline HTML file later."""
