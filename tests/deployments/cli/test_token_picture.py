"""The picture of tokens arriving: where each stands, when it appears, and that it is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

from deployments.cli.token_picture import ADVANCE, COLOURS, COLUMNS, LINE, MARGIN, REST_S, Arrival, svg

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[ElementTree.Element]:
    return [text for text in ElementTree.fromstring(picture).iter(f"{SVG}text") if "textLength" in text.attrib]


def test_tokens_stand_side_by_side_in_the_colour_of_their_origin() -> None:
    first, second, third = words(
        svg([Arrival(0.0, ("One",), ("plain",)), Arrival(1.0, (" two", " <3"), ("accepted", "bonus"))], "x")
    )
    assert [first.text, second.text, third.text] == ["One", " two", " <3"]
    assert float(second.attrib["x"]) == MARGIN + 3 * ADVANCE
    assert [one.attrib["fill"] for one in (first, second, third)] == [
        COLOURS["plain"],
        COLOURS["accepted"],
        COLOURS["bonus"],
    ]


def test_tokens_of_a_pass_appear_together_and_those_of_the_first_are_there() -> None:
    first, second, third = words(
        svg([Arrival(0.0, ("a",), ("plain",)), Arrival(1.0, ("b", "c"), ("accepted",) * 2)], "x")
    )
    assert first.find(f"{SVG}animate") is None
    moments = [one.find(f"{SVG}animate").attrib["keyTimes"] for one in (second, third)]  # type: ignore[union-attr]
    assert moments == [f"0;{1 / (1 + REST_S):.4f}"] * 2


def test_lines_break_at_the_edge_and_where_the_text_says_so() -> None:
    long = "x" * (COLUMNS - 2)
    pieces = words(svg([Arrival(0.0, (long, " word", "\n\nend"), ("plain",) * 3)], "x"))
    assert [piece.text for piece in pieces] == [long, "word", "end"]
    heights = [int(piece.attrib["y"]) for piece in pieces]
    assert [height - heights[0] for height in heights] == [0, LINE, 3 * LINE]


def test_a_title_is_text_and_an_empty_answer_is_a_picture() -> None:
    root = ElementTree.fromstring(svg([], 'a "b" <c>'))
    assert root.find(f"{SVG}title").text == 'a "b" <c>'  # type: ignore[union-attr]
