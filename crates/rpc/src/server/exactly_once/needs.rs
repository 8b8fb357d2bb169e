//! Which calls come in a replay slot: what the table of operations says ([`SlotUse`]).

use crate::wire::SlotUse;

/// Why a call is not carried out that comes in a slot, or in none; nothing if it comes as it
/// should.
pub(crate) fn objection(slot: SlotUse, in_slot: bool) -> Option<&'static str> {
    match (slot, in_slot) {
        (SlotUse::Needed | SlotUse::Allowed, true)
        | (SlotUse::Allowed | SlotUse::Refused, false) => None,
        (SlotUse::Needed, false) => Some("a change that comes in no replay slot"),
        (SlotUse::Refused, true) => Some("not a change, but in a replay slot"),
    }
}
