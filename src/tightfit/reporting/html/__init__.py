"""One offline HTML page about a plan: memory along the step, its holders, and cost.

`facts` turns a graph and a plan into the numbers that the page draws, `sentences` into words,
`page` fills in a template of this folder. `frame.html` is the part that all pages share:
`page.html` is the page about one plan, `parts.html` (filled in by `parts`) that about a model
planned part by part. With them go `style.css`, `script.js` and Apache ECharts (`echarts.min.js`,
unchanged as its project publishes it; `echarts.LICENSE` goes into every page that it draws on).
Nothing is fetched from anywhere.
"""
