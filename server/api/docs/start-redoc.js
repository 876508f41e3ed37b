Redoc.init("openapi.json", {}, document.getElementById("redoc"));
