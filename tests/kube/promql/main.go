// Checks alerting rules and queries with Prometheus' own parser and engine.
//
// Reads a question in JSON from standard input, and prints the answer in JSON:
//
//	rules    a file of rules in YAML, checked as promtool does
//	queries  further queries
//	cases    lists of series in the notation of promtool ("name{label="value"} 1 1x3"), one value each 30 s
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"log/slog"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

const interval = 30 * time.Second

type question struct {
	Rules   string     `json:"rules"`
	Queries []string   `json:"queries"`
	Cases   [][]string `json:"cases"`
}

type answer struct {
	// What is wrong with the rules and the queries.
	Errors []string `json:"errors"`
	// The metrics of each rule and query,
	Metrics map[string][]string `json:"metrics"`
	// and the labels that it selects or groups by.
	Labels map[string][]string `json:"labels"`
	// For each case, the alerts whose expression has a result at the end of the series, without regard to `for`,
	Firing [][]string `json:"firing"`
	// and the queries that have none.
	Empty [][]string `json:"empty"`
}

func main() {
	log.SetFlags(0)
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		log.Fatalf("cannot read the question: %v", err)
	}
	language := parser.NewParser(parser.Options{})
	told := answer{Metrics: map[string][]string{}, Labels: map[string][]string{}}
	alerts := map[string]string{}
	groups, errs := rulefmt.Parse([]byte(asked.Rules), false, model.UTF8Validation, language, slog.New(slog.DiscardHandler))
	for _, err := range errs {
		told.Errors = append(told.Errors, err.Error())
	}
	queries := append([]string{}, asked.Queries...)
	if groups != nil {
		for _, group := range groups.Groups {
			for _, rule := range group.Rules {
				alerts[rule.Alert] = rule.Expr
				queries = append(queries, rule.Expr)
			}
		}
	}
	for _, query := range queries {
		expression, err := language.ParseExpr(query)
		if err != nil {
			told.Errors = append(told.Errors, fmt.Sprintf("%s: %v", query, err))
			continue
		}
		told.Metrics[query], told.Labels[query] = names(expression)
	}
	if len(told.Errors) == 0 {
		for _, series := range asked.Cases {
			known, end := parse(language, series)
			var firing, empty []string
			for name, query := range alerts {
				if count(language, known, query, end) > 0 {
					firing = append(firing, name)
				}
			}
			for _, query := range asked.Queries {
				if count(language, known, query, end) == 0 {
					empty = append(empty, query)
				}
			}
			sort.Strings(firing)
			told.Firing = append(told.Firing, firing)
			told.Empty = append(told.Empty, empty)
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(told); err != nil {
		log.Fatal(err)
	}
}

// names returns the metrics and the labels in an expression.
func names(expression parser.Expr) (metrics, of []string) {
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		switch node := node.(type) {
		case *parser.VectorSelector:
			metrics = append(metrics, node.Name)
			for _, matcher := range node.LabelMatchers {
				if matcher.Name != model.MetricNameLabel {
					of = append(of, matcher.Name)
				}
			}
		case *parser.AggregateExpr:
			of = append(of, node.Grouping...)
		}
		return nil
	})
	return metrics, of
}

func parse(language parser.Parser, texts []string) (memory, time.Time) {
	var known memory
	end := time.Unix(0, 0)
	for _, text := range texts {
		metric, values, err := language.ParseSeriesDesc(text)
		if err != nil {
			log.Fatalf("%s: %v", text, err)
		}
		var samples []chunks.Sample
		for i, value := range values {
			at := time.Unix(0, 0).Add(time.Duration(i) * interval)
			if !value.Omitted {
				samples = append(samples, sample{at.UnixMilli(), value.Value})
			}
			if at.After(end) {
				end = at
			}
		}
		known = append(known, series{metric, samples})
	}
	return known, end
}

// count returns the number of results of a query at a time.
func count(language parser.Parser, known memory, query string, at time.Time) int {
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: slog.New(slog.DiscardHandler), MaxSamples: 1e6, Timeout: time.Minute, Parser: language,
	})
	asked, err := engine.NewInstantQuery(context.Background(), known, nil, query, at)
	if err != nil {
		log.Fatalf("%s: %v", query, err)
	}
	defer asked.Close()
	result := asked.Exec(context.Background())
	if result.Err != nil {
		log.Fatalf("%s: %v", query, result.Err)
	}
	vector, err := result.Vector()
	if err != nil {
		log.Fatalf("%s: %v", query, err)
	}
	return len(vector)
}

// memory is a storage of a few series.
type memory []series

type series struct {
	metric  labels.Labels
	samples []chunks.Sample
}

func (m memory) Querier(_, _ int64) (storage.Querier, error) { return m, nil }

func (m memory) Close() error { return nil }

func (m memory) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (m memory) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (m memory) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found []storage.Series
	for _, known := range m {
		if known.matches(matchers) {
			found = append(found, storage.NewListSeries(known.metric, known.samples))
		}
	}
	sort.Slice(found, func(i, j int) bool {
		return strings.Compare(found[i].Labels().String(), found[j].Labels().String()) < 0
	})
	return &set{found: found, at: -1}
}

func (s series) matches(matchers []*labels.Matcher) bool {
	for _, matcher := range matchers {
		if !matcher.Matches(s.metric.Get(matcher.Name)) {
			return false
		}
	}
	return true
}

// set is a list of series as the engine reads it.
type set struct {
	found []storage.Series
	at    int
}

func (s *set) Next() bool                        { s.at++; return s.at < len(s.found) }
func (s *set) At() storage.Series                { return s.found[s.at] }
func (s *set) Err() error                        { return nil }
func (s *set) Warnings() annotations.Annotations { return nil }

// sample is a value without a start time, and no histogram.
type sample struct {
	at    int64
	value float64
}

func (s sample) T() int64                      { return s.at }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.value }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }
