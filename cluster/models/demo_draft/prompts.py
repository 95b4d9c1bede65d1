"""Prompts to distill the demo draft with: kinds of question times subjects, none of them a held-out subject.

    python -m cluster.models.demo_draft.prompts > prompts.txt

The kinds include those of held-prompts.json, which measures what a draft learned about its target, not about subjects.
"""

from __future__ import annotations

import itertools
import random

KINDS = (
    "List five facts about {}.",
    "Make a weekly plan focused on {}.",
    "Write a poem about {}.",
    "Rewrite this sentence to be clearer: People who like {} they often spend time on it a lot.",
    "Summarize the history of {}.",
    "Give an example that shows {} in everyday life.",
    "Write a short story about {}.",
    "Write three quiz questions about {} with answers.",
    "Why is {} important?",
    "Give me three tips about {}.",
    "What are the benefits of learning about {}?",
    "Write a dialogue between two people discussing {}.",
    "What is the difference between good and bad advice on {}?",
    "What questions should a beginner ask about {}?",
    "How would you teach {} to a child?",
    "Create a step-by-step guide about {}.",
    "Compare {} with something similar.",
    "Write a product description about {}.",
    "Write an email to a friend about {}.",
    "What is the future of {}?",
    "Explain {} in simple terms.",
    "Translate this idea into a metaphor: {}.",
    "What is {}?",
    "How does {} work?",
    "What are common mistakes with {}?",
    "Describe {} in one paragraph.",
    "Write a speech about {}.",
    "What should everyone know about {}?",
    "Name some famous examples of {} and say why they matter.",
    "Write a review of a book about {}.",
    "What do people get wrong about {}?",
    "I have to give a talk on {}. How should I begin?",
)

_SUBJECTS = """
    volcanoes, rivers, oceans, mountains, clouds, thunderstorms, hurricanes, tornadoes, earthquakes, tides,
    waterfalls, coral reefs, wetlands, caves, islands, beaches, meadows, jungles, the Arctic, winter, spring,
    summer, rainbows, fog, lightning, the moon, the sun, planets, galaxies, black holes, asteroids, meteorites,
    telescopes, rockets, space stations, gravity, magnetism, light, heat, friction, atoms, molecules, chemical
    reactions, acids, crystals, metals, plastics, glass, paper, ink, steel, concrete, bricks, wood, cotton, silk,
    wool, leather, dyes, algebra, statistics, calculus, prime numbers, percentages, graphs, logic, set theory,
    measurement, calendars, clocks, computers, the internet, programming, web browsers, search engines, passwords,
    encryption, robots, drones, smartphones, spreadsheets, email, social media, artificial intelligence, machine
    learning, algorithms, operating systems, keyboards, printers, open source software, virtual reality, solar
    panels, wind turbines, nuclear power, engines, bicycles, trains, airplanes, ships, submarines, cars, buses,
    trams, elevators, tunnels, roads, harbors, lighthouses, cats, horses, elephants, tigers, wolves, bears, foxes,
    rabbits, whales, dolphins, sharks, octopuses, salmon, turtles, snakes, lizards, owls, eagles, penguins,
    parrots, ants, spiders, butterflies, beetles, worms, snails, dinosaurs, fossils, evolution, genetics, cells,
    viruses, vaccines, vitamins, proteins, digestion, breathing, sleep, memory, dreams, the brain, bones, muscles,
    teeth, skin, blood, eyesight, hearing, headaches, allergies, first aid, nutrition, bread, cheese, coffee, tea,
    pasta, pizza, salad, apples, bananas, oranges, tomatoes, potatoes, carrots, onions, garlic, pepper, salt,
    sugar, honey, spices, olive oil, eggs, milk, yogurt, ice cream, pancakes, sandwiches, curry, sushi, baking,
    grilling, picnics, restaurants, farming, harvests, orchards, vineyards, trees, roses, cactuses, moss, ferns,
    seeds, compost, lawns, greenhouses, piano, violin, drums, flute, singing, opera, choirs, rock music, folk
    songs, dancing, ballet, theater, cinema, photography, sculpture, drawing, watercolors, architecture, fashion,
    jewelry, pottery, weaving, knitting, origami, calligraphy, comics, fairy tales, myths, legends, biographies,
    diaries, essays, newspapers, libraries, museums, schools, universities, exams, homework, teachers, nurses,
    firefighters, pilots, lawyers, engineers, scientists, inventors, explorers, football, basketball, tennis,
    swimming, running, cycling, skiing, surfing, climbing, hiking, camping, fishing, sailing, golf, boxing,
    gymnastics, meditation, stretching, card games, crosswords, puzzles, magic tricks, toys, kites, parks, zoos,
    markets, supermarkets, banks, taxes, savings, loans, inflation, trade, advertising, startups, job interviews,
    resumes, meetings, teamwork, leadership, negotiation, time management, note taking, reading, spelling, grammar,
    vocabulary, foreign languages, translation, sign language, kindness, courage, patience, gratitude, friendship,
    trust, anger, fear, happiness, boredom, curiosity, creativity, habits, goals, ethics, democracy, elections,
    constitutions, courts, human rights, freedom of speech, citizenship, ancient Egypt, ancient Rome, the Middle
    Ages, the Renaissance, the Industrial Revolution, knights, samurai, pirates, coins, stamps, flags, festivals,
    weddings, birthdays, holidays, traditions, hotels, airports, travel, backpacking, road trips, cities, villages,
    houses, kitchens, furniture, carpets, windows, doors, lamps, candles, recycling, pollution, water conservation,
    endangered species, wind, floods, droughts, soil
"""
SUBJECTS = tuple(" ".join(subject.split()) for subject in _SUBJECTS.split(","))


def prompts(seed: int = 0) -> list[str]:
    """All of them, shuffled by `seed`."""
    found = [kind.format(subject) for kind, subject in itertools.product(KINDS, SUBJECTS)]
    random.Random(seed).shuffle(found)
    return found


if __name__ == "__main__":
    print("\n".join(prompts()))
