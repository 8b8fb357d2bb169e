//! The batch jobs of callers: a server asks when its status is requested
//! ([`NotifyHead::JOB_QUERY`](super::NotifyHead::JOB_QUERY)), answered by a client
//! ([`NotifyHead::JOBS`](super::NotifyHead::JOBS)).

use dray_core::{CallersJob, Pid};

use crate::wire::codec::{Input, Malformed, Wire};

/// Callers in one question, and in one answer.
pub const CALLERS_MAX: usize = 256;
/// Longest name of a job, bytes.
const JOB_MAX_BYTES: usize = 64;

/// Appends a question for these callers, of whom there are [`CALLERS_MAX`] at most.
pub fn put_callers(callers: &[Pid], out: &mut Vec<u8>) {
    (callers.len() as u32).put(out);
    callers.iter().for_each(|caller| caller.put(out));
}

/// Takes it off again. Errors: too many callers.
pub fn get_callers(input: &mut Input<'_>) -> Result<Vec<Pid>, Malformed> {
    (0..count(input)?).map(|_| input.get()).collect()
}

/// Appends an answer; beyond [`CALLERS_MAX`] callers are left out.
pub fn put_jobs(jobs: &[CallersJob], out: &mut Vec<u8>) {
    let jobs = &jobs[..jobs.len().min(CALLERS_MAX)];
    (jobs.len() as u32).put(out);
    for (caller, job) in jobs {
        caller.put(out);
        (&**job).put(out);
    }
}

/// Takes it off again. Errors: too many callers, or a job of too long a name.
pub fn get_jobs(input: &mut Input<'_>) -> Result<Vec<CallersJob>, Malformed> {
    let one = |input: &mut Input<'_>| {
        let (caller, job): (Pid, &str) = (input.get()?, input.get()?);
        match job.len() <= JOB_MAX_BYTES {
            true => Ok((caller, job.into())),
            false => Err(Malformed("a job of too long a name")),
        }
    };
    (0..count(input)?).map(|_| one(input)).collect()
}

fn count(input: &mut Input<'_>) -> Result<usize, Malformed> {
    let count = input.get::<u32>()? as usize;
    if count <= CALLERS_MAX { Ok(count) } else { Err(Malformed("too many callers")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_are_bounded() {
        let mut question = Vec::new();
        put_callers(&[Pid(7), Pid(8)], &mut question);
        assert_eq!(get_callers(&mut Input(&question)), Ok(vec![Pid(7), Pid(8)]));
        assert!(get_callers(&mut Input(&question[..9])).is_err());
        let mut answer = Vec::new();
        put_jobs(&[(Pid(7), "a".into())], &mut answer);
        assert_eq!(get_jobs(&mut Input(&answer)), Ok(vec![(Pid(7), "a".into())]));
        let many = vec![(Pid(7), "x".into()); CALLERS_MAX + 1];
        answer.clear();
        put_jobs(&many, &mut answer);
        assert_eq!(get_jobs(&mut Input(&answer)).unwrap().len(), CALLERS_MAX);
        answer.clear();
        put_jobs(&[(Pid(7), "x".repeat(JOB_MAX_BYTES + 1).into())], &mut answer);
        assert!(get_jobs(&mut Input(&answer)).is_err());
        (CALLERS_MAX as u32 + 1).put(&mut answer);
        let end = answer.len() - 4;
        assert!(get_callers(&mut Input(&answer[end..])).is_err());
    }
}
