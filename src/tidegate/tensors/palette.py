"""Color-blind safe colors: Okabe and Ito's palette without its yellow, which is too pale for lines."""

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
BLACK = "#000000"
