"""Classic faults of inference engines, as small changes of our source. Each must turn a test red.

To see which tests notice one: `pytest --mutate NAME`. A fault that none notices is a hole in the
tests. `seen` names a project where the bug, or one very like it, has been met.
"""

import dataclasses
from typing import Any

BATCH = "inferjax.engine.batch:"
COLLECT = "inferjax.engine.collect:"
PAGES = "inferjax.engine.pages:SequencePages."
POOL = "inferjax.kv.pool:PagePool."
SCHEDULER = "inferjax.engine.scheduler:Scheduler."
SLOTS = "inferjax.runtime.slots:"
STEPS = "inferjax.runtime.steps:"
TEXT = "inferjax.engine.text:TextStream."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`old`, which is in the source of `target` once, becomes `new`.

    check, args: a test of the default run that must then fail, "file.function", and its arguments.
    programs: compiled functions that call the target and are traced again.
    """

    about: str
    seen: str
    target: str
    old: str
    new: str
    check: str
    args: tuple[Any, ...] = ()
    programs: tuple[str, ...] = ()


PREFIX_CACHE = {
    "hit-one-token-late": Fault(
        about="after a hit the prefill leaves out one token more than was cached",
        seen="tenstorrent/vllm#415",
        target=PAGES + "attach",
        old="sequence.registered = computed, num_hits",
        new="sequence.registered = computed + (num_hits > 0), num_hits",
        check="test_scenarios.test_pages_of_a_running_prompt_are_found_at_once",
    ),
    "hit-pages-out-of-order": Fault(
        about="a hit lists its pages in another order than they were filled",
        seen="tanishqkumar/ssd#23",
        target=PAGES + "attach",
        old="pages.append(page)",
        new="pages.insert(first, page)",
        check="test_scenarios.test_pages_of_a_running_prompt_are_found_at_once",
    ),
    "full-hit-runs-no-token": Fault(
        about="a prompt that is cached as a whole runs no token, and nothing can be drawn",
        seen="tenstorrent/vllm#415",
        target=SCHEDULER + "_match_limit",
        old="sequence.prompt_len - 1 if",
        new="sequence.prompt_len if",
        check="test_scenarios.test_salt_keeps_caches_apart",
    ),
    "hash-without-salt": Fault(
        about="pages are found by requests of another salt",
        seen="vllm#30931",
        target="inferjax.engine.track:make_track",
        old="cache_root(*origin, request.cache_salt)",
        new="cache_root(*origin)",
        check="test_scenarios.test_salt_keeps_caches_apart",
    ),
    "hash-without-weights": Fault(
        about="pages outlive the weights that they were computed with",
        seen="vllm#44250",
        target="inferjax.engine.track:make_track",
        old="cache_root(*origin, request.cache_salt)",
        new="cache_root(request.cache_salt)",
        check="test_hits.test_page_of_old_weights_is_not_found",
    ),
    "hash-without-parent": Fault(
        about="a page is named by its own tokens, whatever comes before them",
        seen="Megatron-LM#4158",
        target="inferjax.kv.prefix:page_digests",
        old="parent = hashlib.sha256(parent + content).digest()",
        new="parent = hashlib.sha256(root + content).digest()",
        check="test_hits.test_page_is_not_found_at_another_place",
    ),
    "phantom-entry": Fault(
        about="a page that is evicted is still found under its old contents",
        seen="local-inference-lab/vllm#480",
        target=POOL + "take",
        old="self._unregister(page)",
        new="self._digests[page] = None",
        check="test_scenarios.test_evicted_prefix_is_not_found_again",
    ),
    "page-registered-before-it-is-full": Fault(
        about="a page is found although only its first tokens have been computed",
        seen="nano-vllm#212",
        target=PAGES + "register",
        old="min(upto, len(sequence.tokens)) // self.page_size",
        new="min(-(-upto // self.page_size), len(sequence.tokens) // self.page_size)",
        check="test_scenarios.test_evicted_prefix_is_not_found_again",
    ),
    "evictable-while-held": Fault(
        about="a cached page that is held again can still be evicted",
        seen="sglang#35270",
        target=POOL + "hold",
        old="self._eviction.remove(page)",
        new="pass",
        check="test_scenarios.test_evicted_prefix_is_not_found_again",
    ),
}

CHUNKS = {
    "chunk-written-from-the-start": Fault(
        about="later rows of a prompt are written over its first ones",
        seen="vllm#36580",
        target=BATCH + "_fill_piece",
        old="batch.starts[row] = stop - start, start",
        new="batch.starts[row] = stop - start, start - chunk.start",
        check="test_scenarios.test_pages_of_a_running_prompt_are_found_at_once",
    ),
    "chunk-draws-too-early": Fault(
        about="a prompt that is not complete draws its first token",
        seen="vllm#26042",
        target=SCHEDULER + "_run_chunk",
        old="last = stop == sequence.prefill_end",
        new="last = stop >= sequence.prefill_end - 1",
        check="test_scenarios.test_prompt_scores_survive_a_preemption_while_decoding",
    ),
}

WINDOWS = {
    "window-trimmed-one-page-early": Fault(
        about="a page is given back while its last position is still in the window",
        seen="vllm#3385",
        target=PAGES + "trim",
        old="self._first_page(group, oldest_query)",
        new="self._first_page(group, oldest_query) + 1",
        check="test_scenarios.test_window_edges",
        args=((6, 6), 5),
    ),
    "window-trimmed-with-work-in-flight": Fault(
        about="a window moves on although a prefill of the same step still sees its pages",
        seen="vllm#32255",
        target=SCHEDULER + "_place",
        old="if end and",
        new="self.pages.trim(sequence, sequence.computed)\n    if end and",
        check="test_scenarios.test_pages_of_a_running_prompt_are_found_at_once",
    ),
    "window-hit-without-its-first-page": Fault(
        about="a hit counts although the oldest page of the window is gone",
        seen="kvcached#446",
        target=PAGES + "match",
        old="runs[group] > page - first",
        new="runs[group] >= page - first",
        check="test_scenarios.test_window_edges",
        args=((None, 6), 5),
    ),
    "window-forgotten-by-a-fork": Fault(
        about="a sample shares pages that its leader's window has already left",
        seen="kvcached#446",
        target=PAGES + "can_fork",
        old="first = self._first_page(group, length)",
        new="first = stop",
        check="test_scenarios.test_siblings_share_their_prompt",
        args=(9, 2),
    ),
}

ROWS = {
    "seed-of-the-slot": Fault(
        about="a row's randomness is that of the slot it is in",
        seen="vllm#51226",
        target=BATCH + "Batches._fill",
        old="rows.keys[i] = own.key",
        new="rows.keys[i] = (0, sequence.slot)",
        check="test_scenarios.test_resume_from_the_cache_alone_needs_no_prefill",
    ),
    "sample-index-lost": Fault(
        about="all samples of a request are the same",
        seen="vllm#21310",
        target=BATCH + "Batches._fill",
        old="= own.sample_index",
        new="= 0",
        check="test_scenarios.test_siblings_share_their_prompt",
        args=(9, 5),
    ),
    "key-lost-on-resume": Fault(
        about="a sequence that was preempted goes on with another seed",
        seen="vllm#16832",
        target=BATCH + "Batches._fill",
        old="rows.keys[i] = own.key",
        new="rows.keys[i] = (0, 0) if sequence.resumed else own.key",
        check="test_scenarios.test_preempted_sequence_resumes_at_any_place_in_a_page",
        args=(4, 1),
    ),
    "settings-in-another-order": Fault(
        about="rows have the sampling settings of their neighbours",
        seen="vllm#5639",
        target=BATCH + "Batches._rows",
        old="for sequence in sequences]",
        new="for sequence in reversed(sequences)]",
        check="test_rows.test_rows_that_are_placed_together_keep_their_settings",
    ),
    "move-not-applied": Fault(
        about="the host moves a sequence to another slot, the device does not",
        seen="vllm#5639",
        target=BATCH + "Batches.rows",
        old="index[new] = old",
        new="pass",
        check="test_rows.test_rows_go_on_in_another_slot",
    ),
    "prompt-length-lost-on-resume": Fault(
        about="after a preemption the output counts as prompt, so penalties and limits are wrong",
        seen="FastDeploy#3080",
        target=BATCH + "Batches._fill",
        old="rows.prompt_lens[i] = prompt_len",
        new="rows.prompt_lens[i] = known",
        check="test_scenarios.test_preempted_sequence_resumes_at_any_place_in_a_page",
        args=(4, 1),
    ),
    "forced-tokens-start-over-on-resume": Fault(
        about="after a preemption the forced tokens begin again with the first",
        seen="vllm#16832",
        target=BATCH + "Batches._fill",
        old="known - prompt_len : forced_len - prompt_len",
        new=": forced_len - known",
        check="test_rows.test_forced_tokens_go_on_after_a_preemption",
        args=(3,),
    ),
    "history-of-the-prompt-alone": Fault(
        about="after a preemption the history does not hold the output",
        seen="vllm-ascend#11334",
        target=BATCH + "Batches._fill",
        old="rows.history[i, :known] = tokens",
        new="rows.history[i, :prompt_len] = tokens[:prompt_len]",
        check="test_scenarios.test_preempted_sequence_resumes_at_any_place_in_a_page",
        args=(4, 1),
    ),
}

SCORES = {
    "prompt-logprobs-shifted": Fault(
        about="log-probabilities of the prompt are reported one place early",
        seen="vllm#15381",
        target=COLLECT + "_take_scores",
        old="request.scores[start + 1 : start + 1 + count] = values",
        new="request.scores[start : start + count] = values",
        check="test_scenarios.test_prompt_without_output_is_scored",
    ),
    "score-lost-between-chunks": Fault(
        about="the last token of a row has no score: its successor is in the next row",
        seen="vllm#5334",
        target=BATCH + "_fill_piece",
        old="min(stop + 1, sequence.prompt_len)",
        new="min(stop, sequence.prompt_len)",
        check="test_scenarios.test_prompt_without_output_is_scored",
    ),
    "scored-prompt-reads-the-cache": Fault(
        about="what comes from the cache has no logits, so its log-probabilities are missing",
        seen="vllm#25262",
        target="inferjax.engine.track:make_track",
        old="reads_cache=leader is not None or not request.wants_prompt",
        new="reads_cache=True",
        check="test_scenarios.test_prompt_without_output_is_scored",
    ),
    "scores-of-the-output": Fault(
        about="after a preemption the output is prefilled, and taken for a scored prompt",
        seen="vllm#5334",
        target=COLLECT + "_take_scores",
        old="min(piece.chunk.stop, len(request.request.prompt_ids) - 1) - start",
        new="piece.chunk.stop - start",
        check="test_scenarios.test_prompt_scores_survive_a_preemption_while_decoding",
    ),
}

STREAMS = {
    "held-text-lost": Fault(
        about="text that could have become a stop string is lost when the output ends",
        seen="llama.cpp#9867",
        target=TEXT + "finish",
        old="[*pieces, self._stops.flush()]",
        new="pieces",
        check="test_text.test_text_is_finished_once",
    ),
    "stop-string-leaks": Fault(
        about="the beginning of a stop string is shown before its end has come",
        seen="vllm#3672",
        target="inferjax.tokenizer.stops:StopStrings._possible_prefix",
        old="return size",
        new="return 0",
        check="test_text.test_text_never_leaks_a_part_of_a_stop_string_however_it_is_cut",
        args=("###",),
    ),
    "stop-string-checked-after-the-dispatch": Fault(
        about="tokens that a dispatch drew after the stop string still count",
        seen="vllm#35705",
        target=TEXT + "push",
        old="if self._finished or self.stop is not None:",
        new="if self._finished:",
        check="test_text.test_text_drops_what_comes_after_the_end",
    ),
    "tokens-after-the-stop-kept": Fault(
        about="the text ends at the stop string, the token ids go on",
        seen="vllm#37937",
        target=COLLECT + "Collector._row",
        old="tokens_of(drawn, row, pushed.num_tokens, request)",
        new="tokens_of(drawn, row, count, request)",
        check="test_stop_strings.test_stop_string_ends_the_tokens_where_it_ends_the_text",
        args=(8, True),
    ),
    "stop-before-the-minimum": Fault(
        about="a stop string ends an output that is shorter than min_tokens",
        seen="vllm#21987",
        target=TEXT + "_shown",
        old="armed=self._num_tokens > self._min_tokens",
        new="armed=True",
        check="test_text.test_text_min_tokens_pass_over_a_stop_string_for_good",
    ),
}

ACCOUNTS = {
    "pages-kept-by-an-abort-in-flight": Fault(
        about="pages of a request that ends while it has work under way never come back",
        seen="vllm-ascend#16662",
        target=SCHEDULER + "_leave",
        old="self.pages.release(sequence)",
        new="sequence.in_flight or self.pages.release(sequence)",
        check="test_scenarios.test_abort_of_a_request_with_samples_in_all_phases",
        args=(2,),
    ),
    "page-given-back-twice": Fault(
        about="a page that a window has left is given back again at the end",
        seen="sglang#11970",
        target=PAGES + "trim",
        old="pages[page] = 0",
        new="pass",
        check="test_scenarios.test_window_edges",
        args=((None, 6), 5),
    ),
    "holder-not-counted-on-a-fork": Fault(
        about="a sample shares its leader's pages without holding them",
        seen="sglang-jax#982",
        target=PAGES + "fork",
        old="pool.hold(page)",
        new="pass",
        check="test_scenarios.test_siblings_share_their_prompt",
        args=(5, 2),
    ),
    "partial-page-not-copied": Fault(
        about="the page in which samples part is new, but empty",
        seen="vllm#39146",
        target=PAGES + "fork",
        old="copies.append(Copy(group=group, source=source[full], target=pages[full]))",
        new="pass",
        check="test_scenarios.test_siblings_share_their_prompt",
        args=(8, 5),
    ),
    "slot-not-freed": Fault(
        about="the slot of a sequence that has ended stays taken",
        seen="vllm#18485",
        target=SCHEDULER + "_leave",
        old="self._slots.give(sequence)",
        new="sequence.slot = -1",
        check="test_scenarios.test_evicted_prefix_is_not_found_again",
    ),
    "output-forgotten-on-preemption": Fault(
        about="a preempted request starts its output again",
        seen="vllm#16832",
        target=SCHEDULER + "preempt",
        old="sequence.num_preemptions += 1",
        new="del sequence.tokens[sequence.prompt_len :]\n    sequence.num_preemptions += 1",
        check="test_scenarios.test_preempted_sequence_resumes_at_any_place_in_a_page",
        args=(4, 1),
    ),
    "first-come-first-preempted": Fault(
        about="the oldest sequence is preempted, so that two take turns and neither gets on",
        seen="vllm#25538",
        target=SCHEDULER + "_secure",
        old="victim = self._running[-1]",
        new="victim = self._running[0]",
        check="test_scheduler.test_latest_order_is_preempted_first_and_resumes",
    ),
    "admitted-without-a-reserve": Fault(
        about="a prompt is let in to pages that another is half-way through",
        seen="vllm#25538",
        target=SCHEDULER + "_enter",
        old="pool.num_available - others",
        new="pool.num_available",
        check="test_scheduler.test_decoding_sequence_has_a_page_in_reserve",
    ),
    "aborted-in-the-queue-and-still-counted": Fault(
        about="a request that is aborted while it waits is still counted as waiting",
        seen="llama.cpp#13262",
        target=SCHEDULER + "finish",
        old="self._waiting.drop()",
        new="pass",
        check="test_scenarios.test_abort_of_a_request_with_samples_in_all_phases",
        args=(2,),
    ),
    "aborted-and-still-computed": Fault(
        about="an aborted request is forgotten by its user, and the device works on for it",
        seen="llama.cpp#24630",
        target=COLLECT + "Collector.abort",
        old='self._end_sample(sample, "abort")',
        new='sample.finish_reason = "abort"',
        check="test_scenarios.test_abort_of_a_request_with_samples_in_all_phases",
        args=(2,),
    ),
    "pages-beyond-the-longest-output": Fault(
        about="the last dispatch of a request takes pages behind the end of its context",
        seen="vllm#6707",
        target=SCHEDULER + "_decode_end",
        old="min(reach + steps, max_len) - 1",
        new="reach + steps - 1",
        check="test_scheduler.test_decode_never_takes_pages_beyond_the_longest_output",
    ),
}

ASYNC = {
    "table-written-in-flight": Fault(
        about="block tables are handed to the device without a copy, and changed for the next step",
        seen="vllm#31841",
        target=BATCH + "Batches.decode",
        old="table[:size].copy()",
        new="table[:size]",
        check="test_rows.test_rows_go_on_in_another_slot",
    ),
    "stale-table": Fault(
        about="new pages of a sequence do not reach the table of its slot",
        seen="tpu-inference#2366",
        target=PAGES + "grow",
        old="sequence.table_changed = True",
        new="pass",
        check="test_rows.test_forced_tokens_go_on_after_a_preemption",
        args=(3,),
    ),
    "ahead-not-counted": Fault(
        about="pages are taken as if nothing were under way, a dispatch too few",
        seen="vllm#46899",
        target=SCHEDULER + "_decode_end",
        old="len(sequence.tokens) + sequence.ahead",
        new="len(sequence.tokens)",
        check="test_rows.test_rows_go_on_in_another_slot",
    ),
    "readmitted-with-results-under-way": Fault(
        about="a preempted sequence runs again before its last tokens have arrived",
        seen="vllm#57562",
        target=SCHEDULER + "_must_wait",
        old="return sequence.in_flight > 0",
        new="return False",
        check="test_scheduler.test_preempted_sequence_waits_for_its_results",
    ),
    "results-of-a-finished-sequence": Fault(
        about="what was under way for a sample that has ended is added to it",
        seen="vllm#12192",
        target=COLLECT + "Collector._row",
        old="sample is None or sequence.phase is Phase.FINISHED",
        new="sample is None",
        check="test_stop_strings.test_stop_string_ends_the_tokens_where_it_ends_the_text",
        args=(8, True),
    ),
    "tokens-told-twice-after-a-failure": Fault(
        about="a step that broke off reports its tokens once more",
        seen="vllm#46669",
        target="inferjax.engine.track:SampleTrack.rewind",
        old="del sequence.tokens[",
        new="_ = sequence.tokens[",
        check="test_told_once.test_interrupts_while_results_are_taken_in",
    ),
}

DEVICE = {
    "page-beyond-the-pool": Fault(
        about="a page id behind the pool is not noticed",
        seen="tpu-inference#2366",
        target="inferjax.runtime.inputs:place_status",
        old="(table <= TRASH_PAGE) | (table >= num_pages)",
        new="(table <= TRASH_PAGE)",
        check="test_hostile_rows.test_bad_row_is_reported_and_harms_nobody",
        args=("llama", "default", "page beyond the pool"),
        programs=(STEPS + "_extend",),
    ),
    "idle-slot-advances": Fault(
        about="slots that are not active draw as well",
        seen="sglang-jax#204",
        target=SLOTS + "decode_slots",
        old="before.done | ~active",
        new="before.done",
        check="test_slots.test_results_outlive_the_donated_state",
    ),
    "done-row-writes": Fault(
        about="a row that has ended goes on writing to a page that may be another's",
        seen="sglang-jax#20",
        target=STEPS + "decode_step",
        old="lengths=live.astype(jnp.int32)",
        new="lengths=jnp.ones_like(state.tokens)",
        check="test_slots.test_row_that_has_ended_writes_nothing_and_draws_nothing",
        programs=(SLOTS + "decode_slots",),
    ),
    "one-token-too-many": Fault(
        about="an output is one token longer than max_tokens",
        seen="aprender#665",
        target=STEPS + "draw",
        old="count >= state",
        new="count > state",
        check="test_slots.test_row_that_has_ended_writes_nothing_and_draws_nothing",
        programs=(SLOTS + "decode_slots", SLOTS + "begin"),
    ),
    "shape-follows-the-batch": Fault(
        about="every number of rows is a shape of its own, and compiled when it first comes",
        seen="sglang-jax#1476",
        target=BATCH + "Batches.extend",
        old="bucket_for(self._buckets.prefill_rows, count)",
        new="count",
        check="test_scenarios.test_evicted_prefix_is_not_found_again",
    ),
    "decode-shape-follows-the-batch": Fault(
        about="every number of slots is a shape of its own, and compiled when it first comes",
        seen="sglang-jax#609",
        target=BATCH + "Batches.decode",
        old="bucket_for(self._buckets.decode_slots, max(slots) + 1)",
        new="max(slots) + 1",
        check="test_rows.test_rows_go_on_in_another_slot",
    ),
}

FAULTS: dict[str, Fault] = (
    PREFIX_CACHE | CHUNKS | WINDOWS | ROWS | SCORES | STREAMS | ACCOUNTS | ASYNC | DEVICE
)
