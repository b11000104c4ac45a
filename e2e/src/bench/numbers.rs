//! Medians and extremes, and how a table writes them.

/// What repeated measurements say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
    pub(super) count: usize,
}

impl Spread {
    /// None: nothing that is a number.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (&least, &most) = (values.first()?, values.last()?);
        Some(Self { median: median_of_sorted(&values), least, most, count: values.len() })
    }

    pub(super) fn contains(&self, value: f64) -> bool {
        (self.least..=self.most).contains(&value)
    }

    /// "843 (811–1,049)"; one measurement has no extremes.
    pub(super) fn text(&self) -> String {
        match self.count {
            1 => number(self.median),
            _ => format!("{} ({}–{})", number(self.median), number(self.least), number(self.most)),
        }
    }
}

/// NaN of none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    if values.is_empty() { f64::NAN } else { median_of_sorted(&values) }
}

fn median_of_sorted(values: &[f64]) -> f64 {
    match values.len() {
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// As many digits as tell something, thousands set apart: 0.004, 0.46, 1.50, 16.0, 843, 15,586.
pub(super) fn number(x: f64) -> String {
    if !x.is_finite() {
        return "–".to_owned();
    }
    let digits = match x.abs() {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 0.1 || x == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{x:.digits$}");
    if x.abs() < 999.5 {
        return text;
    }
    let (sign, plain) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let mut out = sign.to_owned();
    for (k, digit) in plain.chars().enumerate() {
        if k > 0 && (plain.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_extremes_are_those_of_the_numbers() {
        let spread = Spread::of([3.0, f64::NAN, 1.0, 2.0]).unwrap();
        assert_eq!((spread.median, spread.least, spread.most, spread.count), (2.0, 1.0, 3.0, 3));
        assert_eq!(Spread::of([4.0, 2.0]).unwrap().median, 3.0);
        assert_eq!(Spread::of([f64::NAN, f64::INFINITY]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn numbers_read_as_in_the_documents() {
        let read: Vec<String> = [0.004_19, 0.456, 1.5, 16.04, 843.2, 999.6, 15_586.3, 1_234_567.0, -1234.0]
            .into_iter()
            .map(number)
            .collect();
        assert_eq!(read, ["0.004", "0.46", "1.50", "16.0", "843", "1,000", "15,586", "1,234,567", "-1,234"]);
        assert_eq!(number(f64::NAN), "–");
        assert_eq!(Spread::of([811.0, 843.0, 1049.0]).unwrap().text(), "843 (811–1,049)");
        assert_eq!(Spread::of([7.0]).unwrap().text(), "7.00");
    }
}
