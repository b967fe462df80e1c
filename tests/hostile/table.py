"""Who attacks, in which kind, by what, through which verb, and the test that shows what comes of it.

`tests/unit/test_hostile.py` verifies that each cell has attacks, or a reason why it is empty, and that tests and verbs
exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.hostile.container import ATTEMPTS, LIES, MOUNTS, NETWORK, PARSERS, PROC, REST, SIGNALS
from tests.hostile.supervisor import REPLIES

CONTAINER, OLD_NODE, ADMIN_HOST, ENGINE, STORE = ATTACKERS = (
    *("services container", "old node", "second admin host"),
    *("engine", "snapshot store"),
)
INSIDE = "tests/real/services/test_hostile_container.py"
CONFINED = "tests/real/services/test_confinement.py"


@dataclass(frozen=True)
class Row:
    """One attack. ``verbs`` are words of `sms`; ``test`` is a file and a function."""

    attacker: str
    kind: str
    attack: str
    verbs: tuple[str, ...]
    test: str


IMPLANTED = f"{INSIDE}::test_what_it_leaves_behind_stays_inside"
AT_REST = ("start", "overlay snapshot", "overlay restore", "migrate", "upgrade", "rehearse", "apply")
SUPERVISED = "tests/unit/migration/test_supervisor_replies.py::test_what_no_supervisor_replies_is_an_error"
TREE = "tests/unit/engines/test_state_tree.py"
ASKED = ("status", "migrate", "failover", "overlay list", "journal")
"""Verbs that ask another admin host."""
DEPLOYED = ("deploy", "status", "logs", "exec")
STORED = ("overlay list", "overlay verify", "overlay restore")
STAYS = "test_a_hostile_overlay_in_a_snapshot_stays_in_its_folder"
ROWS = [
    *(
        Row(CONTAINER, attempt.kind, name, ("exec",), f"{INSIDE}::test_what_root_inside_tries_at_once")
        for name, attempt in ATTEMPTS.items()
    ),
    *(
        Row(CONTAINER, PARSERS, f"its programs answer: {name}", verbs, f"{INSIDE}::test_what_it_answers_is_data")
        for name in LIES
        for verbs in [("status", "apply", "overlay snapshot", "migrate", "restart")]
    ),
    *(
        Row(CONTAINER, PARSERS, f"another program is its supervisor: {name}", ("migrate", "adopt"), SUPERVISED)
        for name in REPLIES
    ),
    Row(
        CONTAINER,
        PARSERS,
        "the same while it runs",
        ("migrate",),
        f"{INSIDE}::test_another_program_replies_as_its_supervisor",
    ),
    Row(
        CONTAINER,
        PARSERS,
        "an overlay without a size",
        ("status",),
        "tests/unit/services/test_nodes.py::test_a_size_that_no_overlay_has_is_none",
    ),
    Row(
        ADMIN_HOST,
        PARSERS,
        "times in its history and its records that are none",
        ("journal", "vm snapshot"),
        "tests/unit/services/test_journal.py::test_a_time_of_another_machine_may_be_anything",
    ),
    Row(CONTAINER, MOUNTS, "links of the overlay that lead to the host", AT_REST, IMPLANTED),
    Row(CONTAINER, MOUNTS, "the folder in which apply writes is a link", ("apply",), IMPLANTED),
    Row(
        CONTAINER,
        PROC,
        "Apptainer's program by /proc/PID/exe",
        ("exec",),
        f"{CONFINED}::test_root_inside_cannot_reach_the_host",
    ),
    Row(
        CONTAINER,
        PROC,
        "the same in each program that joins",
        ("exec",),
        f"{CONFINED}::test_a_program_that_joins_is_no_way_to_apptainers_programs",
    ),
    Row(
        CONTAINER,
        PROC,
        "what its shell has open, and prints, while the confinement is checked",
        ("start", "migrate"),
        "tests/unit/services/test_confinement.py::"
        "test_a_program_that_joins_holds_no_file_of_the_host_and_fills_nothing",
    ),
    Row(
        CONTAINER,
        PROC,
        "files given as input and output",
        ("exec",),
        "tests/unit/test_apart.py::test_files_are_out_of_reach_of_a_command",
    ),
    Row(
        CONTAINER,
        SIGNALS,
        "the process group of the caller",
        ("exec",),
        f"{INSIDE}::test_it_cannot_signal_the_group_of_its_caller",
    ),
    Row(
        CONTAINER,
        SIGNALS,
        "all of its processes are killed or stopped during a verb",
        ("overlay snapshot", "status", "migrate", "stop"),
        f"{INSIDE}::test_it_ends_itself_while_a_verb_works",
    ),
    Row(CONTAINER, REST, "programs of the overlay are replaced", AT_REST, IMPLANTED),
    Row(CONTAINER, REST, "a program that runs as root, restored to the host", ("overlay restore",), IMPLANTED),
    Row(CONTAINER, REST, "a file of 900 GB that has no data", ("overlay snapshot", "overlay restore"), IMPLANTED),
    Row(CONTAINER, REST, "a mark that has no end", ("start",), IMPLANTED),
    Row(
        CONTAINER,
        REST,
        "files of the seed that are pipes, devices, or a terabyte",
        ("start",),
        "tests/unit/services/test_seed.py::test_seed_reads_no_more_than_files_of_a_site",
    ),
    Row(
        CONTAINER,
        PARSERS,
        "names of files with escape sequences and options",
        ("overlay diff", "overlay restore"),
        IMPLANTED,
    ),
    Row(
        OLD_NODE,
        MOUNTS,
        "links in the archive of Slurm's state",
        ("adopt",),
        f"{TREE}::test_links_do_not_lead_owner_or_mode_outside",
    ),
    Row(OLD_NODE, MOUNTS, "entries of it that lie elsewhere", ("adopt",), f"{TREE}::test_nothing_outside_is_written"),
    Row(
        OLD_NODE,
        MOUNTS,
        "changes of it behind a link",
        ("adopt",),
        f"{TREE}::test_a_change_removes_nothing_behind_a_link",
    ),
    Row(
        OLD_NODE,
        NETWORK,
        "commands for conntrack",
        ("adopt",),
        "tests/unit/migration/test_move.py::test_translated_connections",
    ),
    Row(
        OLD_NODE,
        NETWORK,
        "options in neighbours",
        ("adopt",),
        "tests/unit/migration/test_move.py::test_neighbours_are_safe_in_commands",
    ),
    Row(
        OLD_NODE,
        REST,
        "a pipe or device for a file",
        ("survey",),
        "tests/unit/adopt/test_survey.py::test_special_files_are_not_opened",
    ),
    Row(
        OLD_NODE,
        REST,
        "a lock that a user of it holds",
        ("adopt",),
        "tests/real/adopt/test_old_node.py::test_addresses_that_return_are_removed_also_while_the_lock_is_held",
    ),
    Row(
        OLD_NODE,
        PARSERS,
        "a command in its database dump",
        ("adopt",),
        "tests/real/adopt/test_adopt.py::test_a_command_in_the_dump_of_the_old_node_does_not_run",
    ),
    Row(
        OLD_NODE,
        PARSERS,
        "statements of another form in it",
        ("adopt",),
        "tests/unit/adopt/test_dump.py::test_anything_else_ends_the_load_with_its_line",
    ),
    Row(
        OLD_NODE,
        PARSERS,
        "odd files",
        ("survey",),
        "tests/unit/adopt/test_survey.py::test_hostile_contents_are_findings",
    ),
    Row(
        OLD_NODE,
        PARSERS,
        "lines whose work is the square of their number",
        ("survey",),
        "tests/unit/adopt/test_survey_bounds.py::test_twice_the_input_is_twice_the_work",
    ),
    Row(
        OLD_NODE,
        PARSERS,
        "text that costs a pattern much time",
        ("survey",),
        "tests/unit/adopt/test_survey.py::test_no_text_of_the_host_keeps_the_reader_busy",
    ),
    *(
        Row(OLD_NODE, kind, attack, verbs, f"tests/real/adopt/test_hostile_old_node.py::{test}")
        for kind, attack, verbs, test in (
            (MOUNTS, "a state that leads elsewhere", ("adopt",), "test_a_state_that_is_none_ends_the_rehearsal"),
            (NETWORK, "a survey without an end", ("survey",), "test_a_survey_that_never_ends_is_ended"),
            (NETWORK, "packets of its own", ("survey",), "test_a_capture_is_data"),
            (REST, "files that are not those of a node", ("survey",), "test_a_survey_is_data"),
            (
                PARSERS,
                "other output of its programs",
                ("adopt",),
                "test_what_programs_of_the_old_node_print_is_data",
            ),
            (
                PARSERS,
                "other messages of its agent",
                ("adopt",),
                "test_an_agent_of_the_old_node_that_lies_adopts_nothing",
            ),
            (
                PARSERS,
                "the same when it is to get the services back",
                ("adopt",),
                "test_an_undo_that_the_old_node_disturbs_leaves_the_container",
            ),
        )
    ),
    *(
        Row(ADMIN_HOST, kind, attack, verbs, f"tests/real/migration/test_hostile_admin_host.py::{test}")
        for kind, attack, verbs, test in (
            (MOUNTS, "pipes and devices for its files", ASKED, "test_what_is_no_file_keeps_no_verb_waiting"),
            (MOUNTS, "links for its folders", ASKED, "test_what_is_no_file_keeps_no_verb_waiting"),
            (NETWORK, "another machine at its address", ASKED, "test_another_host_key_gets_nothing"),
            (NETWORK, "replies without an end", ASKED, "test_what_never_ends_is_not_kept"),
            (REST, "leases that are odd", ASKED, "test_a_lease_is_data"),
            (REST, "leases that claim the services", ("status", "stop", "start"), "test_a_lease_changes_nothing"),
            (PARSERS, "other output of its programs", ASKED, "test_no_output_confuses_a_verb"),
            (PARSERS, "other messages of its agent", ASKED, "test_no_message_confuses_a_verb"),
            (PARSERS, "other replies once a move has begun", ("migrate",), "test_a_move_to_it_fails_and_serves_on"),
        )
    ),
    *(
        Row(ENGINE, kind, attack, verbs, f"tests/real/engines/test_hostile_engine.py::{test}")
        for kind, attack, verbs, test in (
            (NETWORK, "redirections", DEPLOYED, "test_a_redirection_gives_away_nothing_else"),
            (NETWORK, "another machine at its address", DEPLOYED, "test_another_machine_gets_no_token"),
            (NETWORK, "a reply of single bytes", DEPLOYED, "test_a_slow_answer_ends"),
            (NETWORK, "addresses of nodes", ("status",), "test_it_chooses_only_where_a_port_is_looked_at"),
            (REST, "names of kinds that are paths", DEPLOYED, "test_files_are_written_nowhere_else"),
            (
                REST,
                "names of objects in a comparison that are paths",
                ("deploy",),
                "test_files_are_written_nowhere_else",
            ),
            (PARSERS, "every value replaced", DEPLOYED, "test_no_answer_confuses_a_verb"),
            (PARSERS, "kinds replaced", DEPLOYED, "test_no_list_of_kinds_confuses_a_verb"),
            (PARSERS, "an error that quotes a key", ("deploy",), "test_a_quoted_request_shows_no_key"),
            (PARSERS, "names that are options", ("logs", "exec"), "test_names_are_no_options"),
            (PARSERS, "output of a container", ("status",), "test_no_output_of_a_container_confuses_a_verb"),
            (PARSERS, "bodies that need memory", DEPLOYED, "test_memory_is_bounded"),
        )
    ),
    *(
        Row(STORE, PARSERS, attack, STORED, f"tests/unit/snapshots/test_hostile_image.py::{test}")
        for attack, test in (
            ("counts of a superblock that need memory", "test_counts_of_the_superblock_cost_no_memory"),
            (
                "lists of blocks that contain themselves",
                "test_lists_that_contain_themselves_are_followed_as_often_as_there_are_blocks",
            ),
            (
                "fields of a superblock together",
                "test_no_combination_of_fields_costs_memory_or_ends_in_another_error",
            ),
        )
    ),
    Row(
        STORE,
        MOUNTS,
        "mount options in a superblock, such as errors=panic",
        ("overlay pull", "start"),
        "tests/unit/overlay/test_layers_are_folders.py::test_mount_options_of_the_superblock_are_refused",
    ),
    *(
        Row(STORE, kind, attack, verbs, f"tests/real/snapshots/test_hostile_store.py::{test}")
        for kind, attack, verbs, test in (
            (MOUNTS, "links out of an overlay", ("overlay restore",), STAYS),
            (MOUNTS, "devices and programs of root in an overlay", ("overlay restore",), STAYS),
            (MOUNTS, "a damaged file system", ("overlay pull",), "test_a_file_system_that_is_none_is_not_stored"),
            (PROC, "a link to /proc/1/root", ("overlay restore",), STAYS),
            (PROC, "a link to /proc/self/fd", ("overlay restore",), STAYS),
            (NETWORK, "messages without an end", ("overlay list",), "test_an_agent_that_prints_without_end_is_ended"),
            (NETWORK, "no reply", ("overlay list",), "test_an_agent_that_never_answers_is_ended"),
            (REST, "pipes, links and devices in a store", STORED, "test_what_is_no_file_in_a_store_is_damage"),
            (REST, "an earlier repository", ("overlay push",), "test_a_repository_of_earlier_is_noticed"),
            (PARSERS, "odd lists of snapshots", ("overlay list",), "test_a_list_of_snapshots_is_data"),
            (PARSERS, "odd snapshots", ("overlay pull",), "test_a_snapshot_that_is_none_is_not_stored"),
            (PARSERS, "odd requests of a target", ("overlay push",), "test_a_target_of_a_push_that_lies"),
            (PARSERS, "odd replies of borg", ("overlay push",), "test_a_borg_that_lies"),
        )
    ),
]

NO_PROCESS = "No process of it runs on the host that is attacked"
EMPTY = {
    (OLD_NODE, PROC): f"{NO_PROCESS}: its programs run there, and only their output comes over SSH.",
    (OLD_NODE, SIGNALS): f"{NO_PROCESS}.",
    (ADMIN_HOST, PROC): f"{NO_PROCESS}, but with its key, with which it is root there and needs no attack.",
    (ADMIN_HOST, SIGNALS): f"{NO_PROCESS}, but with its key.",
    (
        ENGINE,
        MOUNTS,
    ): "Nothing that it sends is mounted or unpacked. What kubectl writes to files is among files at rest.",
    (ENGINE, PROC): f"{NO_PROCESS}: it replies to kubectl and nomad over HTTPS.",
    (ENGINE, SIGNALS): f"{NO_PROCESS}.",
    (STORE, SIGNALS): f"{NO_PROCESS}.",
}
"""Why an attacker has no attack of a kind."""
