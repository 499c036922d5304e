"""One offline HTML page about a plan: memory along the step, who holds it, what it costs.

`facts` turns a graph and a plan into the numbers that the page draws, `sentences` into words,
`page` joins them with the files beside: `page.html`, `style.css`, `script.js` and Apache ECharts
(`echarts.min.js`, unchanged as its project publishes it; `echarts.LICENSE` goes into every page).
Nothing on the page is fetched from anywhere.
"""
